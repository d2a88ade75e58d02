"""In which precision the model computes; its parameters stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast"]


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward: bf16 where that is safe (`"bf16"`), or nothing (`"fp32"`)."""
    if dtype == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
