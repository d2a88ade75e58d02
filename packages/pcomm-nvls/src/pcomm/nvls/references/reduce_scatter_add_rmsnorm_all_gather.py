"""Reduce-scatter, residual, norm and all-gather by the group's own collectives and torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.normed_rows import NormedRows, fp8_rows, rms_norm
from pcomm.nvls.references.reduce_scatter_tensor import reduce_scatter_tensor

__all__ = ["reduce_scatter_add_rmsnorm_all_gather"]


def reduce_scatter_add_rmsnorm_all_gather(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    collectives: Collectives,
    fp8: Literal["rows"] | Tensor | None = None,
    deterministic: bool = False,
) -> NormedRows:
    """See `pcomm.nvls.reduce_scatter_add_rmsnorm_all_gather`. Collective; returns new tensors.

    The sum over the ranks is that of `reduce_scatter_tensor`: the backend's, or with
    `deterministic` the kernels' bit for bit.
    """
    total = reduce_scatter_tensor(x, collectives=collectives, deterministic=deterministic)
    stream = total + residual
    normed = rms_norm(stream, weight, eps)
    if fp8 is None:
        return NormedRows(collectives.all_gather(normed), stream)
    rows, scales = fp8_rows(normed, fp8 if isinstance(fp8, Tensor) else None)
    # Backends know no 8-bit floats; these are moved as bytes.
    gathered = collectives.all_gather(rows.view(torch.uint8)).view(torch.float8_e4m3fn)
    if isinstance(fp8, Tensor):
        return NormedRows(gathered, stream)
    return NormedRows(gathered, stream, collectives.all_gather(scales))
