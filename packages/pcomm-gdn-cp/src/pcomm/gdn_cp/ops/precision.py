"""In which precision the cores compute: never less than fp32, whatever arrives."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compute_dtype", "full_precision"]


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for all others; states are kept in it too."""
    return torch.promote_types(x.dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """A context on the device of `x` in which autocast lowers nothing.

    A recurrence over thousands of tokens does not bear bf16 products, and the steps of a scan
    write into buffers whose dtype must not change.
    """
    return torch.autocast(x.device.type, enabled=False)
