"""All-reduce, residual and norm by the group's own collectives and torch."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.all_reduce import all_reduce
from pcomm.nvls.references.normed_rows import NormedRows, rms_norm

__all__ = ["all_reduce_add_rmsnorm"]


def all_reduce_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    collectives: Collectives,
    deterministic: bool = False,
) -> NormedRows:
    """See `pcomm.nvls.all_reduce_add_rmsnorm`. Collective; returns new tensors.

    The sum over the ranks is that of `all_reduce`: the backend's, or with `deterministic` the
    kernels' bit for bit.
    """
    total = all_reduce(x, collectives=collectives, deterministic=deterministic)
    stream = total + residual
    return NormedRows(rms_norm(stream, weight, eps), stream)
