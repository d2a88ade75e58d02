"""Reduce-scatter of variable counts by the group's own collectives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.out import deliver
from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.reduce_scatter_tensor import reduce_scatter_tensor
from pcomm.nvls.references.row_counts import bounds_of, pack_rows, unpack_rows
from pcomm.nvls.references.sums import sum_in_rank_order

__all__ = ["reduce_scatter_v"]


def reduce_scatter_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    deterministic: bool = False,
) -> Tensor:
    """See `pcomm.nvls.reduce_scatter_v`. Collective.

    With counts on the device every rank sends as many rows as `out` has place for, so that the host
    need not know them. The sum is that of `reduce_scatter_tensor`.
    """
    size, rank = collectives.size, collectives.rank
    if isinstance(counts, Tensor):
        if out is None:
            out = x.new_zeros(x.shape)
        bounds = bounds_of(counts, len(out), len(x))
        padded = unpack_rows(x, bounds, len(out)).flatten(0, 1)
        own = reduce_scatter_tensor(padded, collectives=collectives, deterministic=deterministic)
        return pack_rows(own[None], bounds[rank : rank + 2] - bounds[rank], out)
    sizes = list(counts)
    if not deterministic:
        return collectives.reduce_scatter(x, sizes=sizes, out=out)
    own_sizes = [sizes[rank]] * size
    parts = collectives.all_to_all(x, send_sizes=sizes, receive_sizes=own_sizes)
    total = sum_in_rank_order(parts.split(own_sizes))
    return deliver(total, out)
