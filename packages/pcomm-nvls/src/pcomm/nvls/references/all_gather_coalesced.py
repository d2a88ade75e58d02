"""All-gathers of several tensors by the group's own collectives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.all_gather_into_tensor import all_gather_into_tensor

__all__ = ["all_gather_coalesced"]


def all_gather_coalesced(
    xs: Sequence[Tensor], *, outs: Sequence[Tensor | None] | None = None, collectives: Collectives
) -> list[Tensor]:
    """See `pcomm.nvls.all_gather_coalesced`. Collective: one operation a tensor."""
    pairs = zip(outs or [None] * len(xs), xs, strict=True)
    return [all_gather_into_tensor(x, out=out, collectives=collectives) for out, x in pairs]
