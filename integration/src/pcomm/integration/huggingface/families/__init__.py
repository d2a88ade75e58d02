"""The families, simplest first."""

from __future__ import annotations

from pcomm.integration.huggingface.families.llama import LLAMA
from pcomm.integration.huggingface.families.mamba2 import MAMBA2
from pcomm.integration.huggingface.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from pcomm.integration.huggingface.families.qwen3_next import QWEN3_NEXT

__all__ = ["FAMILIES"]


FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MAMBA2, QWEN3_NEXT)
"""Every family, by rising number of parts."""
