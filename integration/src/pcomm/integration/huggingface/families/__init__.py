"""The families, simplest first."""

from __future__ import annotations

from pcomm.integration.huggingface.families.decoders import (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from pcomm.integration.huggingface.families.mamba2 import MAMBA2

__all__ = ["FAMILIES"]


FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MAMBA2, QWEN3_NEXT)
"""Every family, by rising number of parts."""
