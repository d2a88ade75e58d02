"""All-gather of variable counts by the group's own collectives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.eight_bit_floats import as_bytes
from pcomm.nvls.references.row_counts import bounds_of, pack_rows

__all__ = ["all_gather_v"]


def all_gather_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    collectives: Collectives,
) -> Tensor:
    """See `pcomm.nvls.all_gather_v`. Collective.

    With counts on the device every rank sends as many rows as `x` has place for, so that the host
    need not know them.
    """
    raw = as_bytes(x)
    if raw is not x:
        found = all_gather_v(raw, counts, out=as_bytes(out), collectives=collectives)
        return found.view(x.dtype) if out is None else out
    if not isinstance(counts, Tensor):
        return collectives.all_gather(x, sizes=list(counts), out=out)
    most_rows, size = x.shape[0], collectives.size
    padded = collectives.all_gather(x).view(size, most_rows, *x.shape[1:])
    if out is None:
        out = x.new_zeros(size * most_rows, *x.shape[1:])
    return pack_rows(padded, bounds_of(counts, most_rows, len(out)), out)
