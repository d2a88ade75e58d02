"""Sums over ranks that do not depend on how a backend adds: in rank order, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sum_in_rank_order"]

_SUMMED_IN_FP32 = (torch.bfloat16, torch.float16, torch.float32)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor from each rank, of their shape and dtype.

    bf16, fp16 and fp32 are added in fp32 and rounded once; other types in themselves. Kernels begin
    with zero, too, so that they return the same bits.
    """
    dtype = parts[0].dtype
    total = torch.zeros_like(parts[0], dtype=torch.float32 if dtype in _SUMMED_IN_FP32 else dtype)
    for part in parts:
        total += part
    return total.to(dtype)
