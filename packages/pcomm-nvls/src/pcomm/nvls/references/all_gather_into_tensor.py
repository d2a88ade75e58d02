"""All-gather by the group's own collectives."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.eight_bit_floats import as_bytes, as_dtype

__all__ = ["all_gather_into_tensor"]


def all_gather_into_tensor(
    x: Tensor, *, out: Tensor | None = None, collectives: Collectives, dim: int = 0
) -> Tensor:
    """See `pcomm.nvls.all_gather_into_tensor`. Collective."""
    found = collectives.all_gather(as_bytes(x), dim=dim, out=as_bytes(out))
    return as_dtype(found, x.dtype) if out is None else out
