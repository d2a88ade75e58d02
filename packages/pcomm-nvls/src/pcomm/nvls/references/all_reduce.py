"""All-reduce by the group's own collectives."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.out import deliver
from pcomm.core.collectives.protocol import Collectives
from pcomm.nvls.references.sums import sum_in_rank_order

__all__ = ["all_reduce"]


def all_reduce(
    x: Tensor, *, out: Tensor | None = None, collectives: Collectives, deterministic: bool = False
) -> Tensor:
    """See `pcomm.nvls.all_reduce`. Collective.

    The order of the sum and its roundings are the backend's. With `deterministic` they are those of
    the kernels that read from peers, bit for bit: each rank adds its range of the numbers.
    """
    if not deterministic:
        return collectives.all_reduce(x, out=out)
    size, rank = collectives.size, collectives.rank
    lengths = [part.numel() for part in x.flatten().tensor_split(size)]
    own = [lengths[rank]] * size
    parts = collectives.all_to_all(x.flatten(), send_sizes=lengths, receive_sizes=own)
    total = sum_in_rank_order(parts.split(own))
    whole = collectives.all_gather(total, sizes=lengths).view(x.shape)
    return deliver(whole, out)
