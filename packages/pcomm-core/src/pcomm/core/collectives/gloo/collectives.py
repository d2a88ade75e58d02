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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.call import Call, OperationName, Reduction
from pcomm.core.collectives.checks import gather_sizes, scatter_sizes
from pcomm.core.collectives.distributed import DistributedCollectives, Issued, in_front
from pcomm.core.collectives.gloo.pairwise import Pairs, PairwiseAllGather, PairwiseReduceScatter
from pcomm.core.collectives.gloo.work_queue import WorkItem, WorkQueue
from pcomm.core.collectives.out import check_out, not_over
from pcomm.core.errors import UnsupportedError

__all__ = ["GlooCollectives"]

# Measured on 2 and 4 ranks of two cores: from here on pairs are as fast or faster; far below it
# torch's are, since every receive that is announced wakes the other rank once more.
_LARGE_BYTES = 256 * 1024
# The dtypes of gloo's own operations, beside complex ones, which are pairs of these. Between pairs
# of ranks bytes are sent, of any dtype.
_KNOWN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


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

    def abandon(self) -> None:
        """Refuse all further operations, and to wait for those in flight. Local."""
        super().abandon()
        self._queue.abandon(self._group.left_in_flight)

    def skip(self, operation: OperationName) -> None:
        """Count an operation that this rank was refused. Local.

        Gathers and reduce-scatters count both among those of pairs and among those of torch, since
        a rank that is refused one may not know which of the two the others take.
        """
        try:
            self._count_as_torch()
        except Exception:  # a communicator that is closed or broken
            super().skip(operation)
        if operation in ("all_gather", "reduce_scatter"):
            self._pairs.skip()

    def _count_as_torch(self) -> None:
        """Take one of the numbers by which torch's operations meet, and send nothing."""
        dist.all_reduce(torch.empty(0), group=self._group.get(), async_op=True)

    def _issue(self, call: Call, is_async: bool) -> Issued:
        if call.operation in ("all_to_all", "broadcast"):
            _check_dtype(call.operation, call.x)
            return super()._issue(call, is_async)
        if call.operation == "all_reduce":
            return super()._issue(call, is_async)
        num_pairwise = self._pairs.num_drawn
        try:
            issued = super()._issue(call, is_async)
        except Exception:
            self._pairs.num_drawn = num_pairwise
            raise
        if self._pairs.num_drawn == num_pairwise:
            self._pairs.skip()
        return issued

    def _operation(self, op: Reduction, x: Tensor) -> Any:
        _check_dtype("all_reduce", x)
        return super()._operation(op, x)

    def _all_gather(self, call: Call, is_async: bool) -> Issued:
        length, uneven = gather_sizes(call, self.rank, self.size)
        lengths = [call.length] * self.size if uneven is None else uneven
        if not _is_large(call, lengths):
            _check_dtype(call.operation, call.x)
            return super()._all_gather(call, is_async)
        gathered, front = check_out(call, length), in_front(call)
        if gathered is None:
            gathered = front.new_empty(length, *front.shape[1:])
        parts = gathered.split(lengths)
        own = parts[self.rank]
        if own.data_ptr() != front.data_ptr():
            own.copy_(not_over(front, own))
        return self._enqueue(PairwiseAllGather(self._pairs, own, parts), gathered, is_async)

    def _reduce_scatter(self, call: Call, is_async: bool) -> Issued:
        length, uneven = scatter_sizes(call, self.rank, self.size)
        lengths = [length] * self.size if uneven is None else uneven
        # What torch cannot add would be found out in the queue, after which nothing else of the
        # communicator works.
        is_added = _is_known(call.x.dtype) or call.x.dtype == torch.int16
        if not is_added or not _is_large(call, lengths):
            _check_dtype(call.operation, call.x)
            return self._exchange_and_add(call, is_async)
        total, front = check_out(call, length), in_front(call)
        own = front.split(lengths)[self.rank]
        if total is None:
            total = torch.empty_like(own)
        # `out` may be this rank's own part of `x`, as NCCL allows: then nothing is copied.
        if total.data_ptr() != own.data_ptr():
            front = not_over(front, total)
            total.copy_(front.split(lengths)[self.rank])
        parts = front.split(lengths)
        return self._enqueue(PairwiseReduceScatter(self._pairs, parts, total), total, is_async)

    def _enqueue(self, item: WorkItem, result: Tensor, is_async: bool) -> Issued:
        self._count_as_torch()
        transfer = self._queue.start(item, is_async=is_async)
        # The queue keeps alive what the operation reads.
        return transfer, None, result


def _is_known(dtype: torch.dtype) -> bool:
    return dtype in _KNOWN or dtype.is_complex


def _check_dtype(operation: str, x: Tensor) -> None:
    """Refuse what gloo's own operations cannot take. Torch would say so at the wait, or not at all.

    Args:
        operation: Name of the operation, for the message.
        x: Tensor to be sent, of any shape.
    """
    if not _is_known(x.dtype):
        raise UnsupportedError(
            f"{operation}: a tensor of shape {tuple(x.shape)}, {x.dtype}",
            found="a gloo group, which knows numbers of 16 to 64 bits, int8, uint8 and bool",
            why="Gloo neither adds nor moves other dtypes, unless in a large all-gather.",
            fix="Convert the tensor, to torch.int32 or torch.float32 for example. To move it as it "
            "is, pass x.view(torch.uint8) and view the result as its dtype.",
        )


def _is_large(call: Call, lengths: Sequence[int]) -> bool:
    """Whether the largest shard is; the same on all ranks, as it comes from what all know."""
    x = call.x
    others = [length for place, length in enumerate(x.shape) if place != call.dim % x.dim()]
    num_bytes = max(lengths) * math.prod(others) * x.itemsize
    return x.device.type == "cpu" and num_bytes >= _LARGE_BYTES
