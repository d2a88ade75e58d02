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

from pcomm.core.collectives.distributed import (
    DistributedCollectives,
    Started,
    in_front,
)
from pcomm.core.collectives.gloo.pairwise import AddUp, Gather, Pairs
from pcomm.core.collectives.gloo.work_queue import Operation, WorkQueue
from pcomm.core.collectives.out import check_out, deliver, is_dense, not_over
from pcomm.core.collectives.shapes import gather_sizes, scatter_sizes, with_length

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

    def _all_gather(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, out: Tensor | None, is_async: bool
    ) -> Started:
        lengths = gather_sizes(x, dim, sizes, self.rank, self.size)
        if lengths is None:
            lengths = [x.shape[dim]] * self.size
        if not self._is_large(x, dim, lengths):
            return super()._all_gather(x, dim, sizes, out, is_async)
        check_out("all_gather", x, with_length(x, dim, sum(lengths)), out)
        front = in_front(x, dim)
        is_direct = dim == 0 and (out is None or is_dense(out))
        if is_direct and out is not None:
            gathered = out
        else:
            gathered = front.new_empty(sum(lengths), *front.shape[1:])
        parts = gathered.split(lengths)
        own = parts[self.rank]
        if own.data_ptr() != front.data_ptr():
            own.copy_(not_over(front, own))
        operation = Gather(self._pairs, own, parts)
        return self._start(operation, gathered, None if is_direct else dim, out, is_async)

    def _reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, out: Tensor | None, is_async: bool
    ) -> Started:
        lengths = scatter_sizes(x, dim, sizes, self.size)
        if lengths is None:
            lengths = [x.shape[dim] // self.size] * self.size
        # These torch cannot add. It says so at once there; here it would be found out in the queue,
        # after which nothing else of the communicator works.
        is_added = not x.is_floating_point() or x.itemsize > 1
        is_added = is_added and x.dtype not in _NOT_ADDED
        if not is_added or not self._is_large(x, dim, lengths):
            return self._exchange_and_add(x, dim, sizes, out, is_async)
        check_out("reduce_scatter", x, with_length(x, dim, lengths[self.rank]), out)
        front = in_front(x, dim)
        own = front.split(lengths)[self.rank]
        is_direct = dim == 0 and (out is None or is_dense(out))
        total = out if out is not None and is_direct else torch.empty_like(own)
        # `out` may be this rank's own part of `x`, as NCCL allows: then nothing is copied.
        if total.data_ptr() != own.data_ptr():
            front = not_over(front, total)
            total.copy_(front.split(lengths)[self.rank])
        parts = front.split(lengths)
        operation = AddUp(self._pairs, parts, total)
        return self._start(operation, total, None if is_direct else dim, out, is_async)

    def _start(
        self,
        operation: Operation,
        result: Tensor,
        dim: int | None,
        out: Tensor | None,
        is_async: bool,
    ) -> Started:
        """Put an operation in the queue; `dim` is where the result's first one goes, if it does."""
        self._group.get()
        transfer = self._queue.start(operation, is_async=is_async)

        def finish() -> Tensor:
            transfer.wait()
            return result if dim is None else deliver(result.movedim(0, dim), out)

        return finish, transfer

    def _is_large(self, x: Tensor, dim: int, lengths: Sequence[int]) -> bool:
        """Whether the largest shard is; the same on all ranks, as it comes from what all know."""
        others = [length for place, length in enumerate(x.shape) if place != dim % x.dim()]
        num_bytes = max(lengths) * math.prod(others) * x.itemsize
        return x.device.type == "cpu" and num_bytes >= _LARGE_BYTES
