"""Reduce-scatter by the group's own collectives."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.out import deliver
from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.sums import sum_in_rank_order

__all__ = ["reduce_scatter_tensor"]


def reduce_scatter_tensor(
    x: Tensor,
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    dim: int = 0,
    deterministic: bool = False,
) -> Tensor:
    """See `pcomm.nvls.reduce_scatter_tensor`. Collective.

    The order of the sum and its roundings are the backend's. With `deterministic` they are those of
    the kernels that read from peers, bit for bit; then `x` is exchanged as it is, and added here.
    """
    if not deterministic:
        return collectives.reduce_scatter(x, dim=dim, out=out)
    parts = collectives.all_to_all(x, dim=dim).chunk(collectives.size, dim)
    total = sum_in_rank_order(parts)
    return deliver(total, out)
