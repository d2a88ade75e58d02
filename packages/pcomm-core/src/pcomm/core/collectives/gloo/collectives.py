"""Collectives of a gloo group: the same as torch's, with fewer bytes and both directions at once.

Gloo's reduce-scatter is an all-reduce of which a part is kept: twice the bytes (pytorch #118911).
Its all-gather and its all-to-all use one direction of a link at a time (see `pairwise.py`). So
large gathers and reduce-scatters go between pairs of ranks here, and small reduce-scatters by an
all-to-all and a local sum. All-to-alls stay torch's: only a pair knows what it exchanges, so ranks
could not agree on what is large.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.distributed import DistributedCollectives, Issued, in_front
from pcomm.core.collectives.gloo.pairwise import Pairs, PairwiseAllGather, PairwiseReduceScatter
from pcomm.core.collectives.gloo.work_queue import WorkItem, WorkQueue
from pcomm.core.collectives.out import check_out, is_direct, not_over
from pcomm.core.collectives.shapes import gather_sizes, scatter_sizes

__all__ = ["GlooCollectives"]

# Measured on 2 and 4 ranks of two cores: from here on pairs are as fast or faster; far below it
# torch's are, since every receive that is announced wakes the other rank once more.
_LARGE_BYTES = 256 * 1024
_NOT_ADDED = (torch.uint16, torch.uint32, torch.uint64)


class GlooCollectives(DistributedCollectives):
    """The `Collectives` of one gloo group; results carry no gradient.

    Args:
        process_group: A group with a gloo backend that this rank belongs to.
    """

    is_seen_by_host = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self._pairs, self._queue = Pairs(self._group), WorkQueue()
        # Not every owner tells that it closes the process group.
        weakref.finalize(process_group, self._queue.forget).atexit = False

    def rest(self) -> None:
        """End the thread of the queue; the next operation begins one again. Local."""
        self._queue.rest()

    def close(self) -> None:
        """Refuse all further operations and end the queue. Local."""
        super().close()
        self._queue.rest()

    def _all_gather(self, call: Call, is_async: bool) -> Issued:
        lengths = gather_sizes(call, self.rank, self.size)
        if lengths is None:
            lengths = [call.x.shape[call.dim]] * self.size
        if not _is_large(call, lengths):
            return super()._all_gather(call, is_async)
        check_out(call, sum(lengths))
        front, out = in_front(call), call.out
        if out is not None and is_direct(call):
            gathered = out
        else:
            gathered = front.new_empty(sum(lengths), *front.shape[1:])
        parts = gathered.split(lengths)
        own = parts[self.rank]
        if own.data_ptr() != front.data_ptr():
            own.copy_(not_over(front, own))
        return self._enqueue(PairwiseAllGather(self._pairs, own, parts), gathered, is_async)

    def _reduce_scatter(self, call: Call, is_async: bool) -> Issued:
        x, out = call.x, call.out
        lengths = scatter_sizes(call, self.size)
        if lengths is None:
            lengths = [x.shape[call.dim] // self.size] * self.size
        # These torch cannot add. It says so at once there; here it would be found out in the queue,
        # after which nothing else of the communicator works.
        is_added = not x.is_floating_point() or x.itemsize > 1
        is_added = is_added and x.dtype not in _NOT_ADDED
        if not is_added or not _is_large(call, lengths):
            return self._exchange_and_add(call, is_async)
        check_out(call, lengths[self.rank])
        front = in_front(call)
        own = front.split(lengths)[self.rank]
        total = out if out is not None and is_direct(call) else torch.empty_like(own)
        # `out` may be this rank's own part of `x`, as NCCL allows: then nothing is copied.
        if total.data_ptr() != own.data_ptr():
            front = not_over(front, total)
            total.copy_(front.split(lengths)[self.rank])
        parts = front.split(lengths)
        return self._enqueue(PairwiseReduceScatter(self._pairs, parts, total), total, is_async)

    def _enqueue(self, item: WorkItem, result: Tensor, is_async: bool) -> Issued:
        self._group.get()
        transfer = self._queue.start(item, is_async=is_async)
        # The queue keeps alive what the operation reads.
        return transfer, None, result


def _is_large(call: Call, lengths: Sequence[int]) -> bool:
    """Whether the largest shard is; the same on all ranks, as it comes from what all know."""
    x = call.x
    others = [length for place, length in enumerate(x.shape) if place != call.dim % x.dim()]
    num_bytes = max(lengths) * math.prod(others) * x.itemsize
    return x.device.type == "cpu" and num_bytes >= _LARGE_BYTES
