"""Gather to one rank by the group's own collectives."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.eight_bit_floats import as_bytes, as_dtype

__all__ = ["gather_to_rank"]


def gather_to_rank(
    x: Tensor,
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    destination: int = 0,
    dim: int = 0,
) -> Tensor | None:
    """See `pcomm.nvls.gather_to_rank`. Collective: an all-to-all that is empty but for one rank."""
    size, length = collectives.size, x.shape[dim]
    is_here = collectives.rank == destination
    send_sizes = [length * (rank == destination) for rank in range(size)]
    receive_sizes = [length * is_here] * size
    parts = collectives.all_to_all(
        as_bytes(x),
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
        dim=dim,
        out=as_bytes(out) if is_here else None,
    )
    if not is_here:
        return None
    return as_dtype(parts, x.dtype) if out is None else out
