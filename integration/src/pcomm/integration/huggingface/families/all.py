"""The families that are known, the simplest first: a model is written as the first that has it."""

from __future__ import annotations

from pcomm.integration.huggingface.families.llama import LLAMA
from pcomm.integration.huggingface.families.mamba2 import MAMBA2
from pcomm.integration.huggingface.families.qwen2 import QWEN2
from pcomm.integration.huggingface.families.qwen3 import QWEN3
from pcomm.integration.huggingface.families.qwen3_moe import QWEN3_MOE
from pcomm.integration.huggingface.families.qwen3_next import QWEN3_NEXT

__all__ = ["FAMILIES"]

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MAMBA2, QWEN3_NEXT)
"""Every family, by rising number of parts."""
