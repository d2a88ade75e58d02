"""Gloo's own all-gather and all-to-all: what pcomm's collectives are without pairs of ranks."""

from __future__ import annotations

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.distributed import DistributedCollectives, Issued

__all__ = ["WithoutPairs"]


class WithoutPairs(DistributedCollectives):
    """Collectives of a gloo group that move the same bytes as pcomm's, and never between pairs.

    A reduce-scatter is an all-to-all and a local sum, since torch's moves twice the bytes.

    Args:
        process_group: A group with a gloo backend that this rank belongs to.
    """

    is_seen_by_host = True

    def _reduce_scatter(self, call: Call, is_async: bool) -> Issued:
        return self._exchange_and_add(call, is_async)
