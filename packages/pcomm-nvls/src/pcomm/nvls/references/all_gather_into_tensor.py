"""All-gather by the group's own collectives."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives

__all__ = ["all_gather_into_tensor"]


def all_gather_into_tensor(
    out: Tensor | None, x: Tensor, *, collectives: Collectives, dim: int = 0
) -> Tensor:
    """See `pcomm.nvls.all_gather_into_tensor`. Collective."""
    return collectives.all_gather(x, dim=dim, out=out)
