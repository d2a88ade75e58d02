"""Collectives over gloo between pairs of ranks, which send fewer bytes than torch's own."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.checks import check_out, gather_sizes, not_over, scatter_sizes
from pcomm.core.collectives.distributed import DistributedCollectives, Issued, OpenGroup, in_front
from pcomm.core.collectives.gloo_queue import WorkItem, WorkQueue
from pcomm.core.collectives.protocol import Call, OperationName, Reduction
from pcomm.core.errors import UnsupportedError

__all__ = ["GlooCollectives", "Pairs", "PairwiseAllGather", "PairwiseReduceScatter"]


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
        return transfer, (), result


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


# -- transfers between pairs: N ranks, L length of a shard ---------------------------------

# Beyond the tags of point-to-point code, and within the 31 bits that torch allows.
_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 30
# A sum receives in chunks, a few of each rank at a time, so that a long one needs room for 3/8 of
# all that it receives. Measured on 4 ranks and links of 400 Mbit/s: with fewer or smaller ones
# links run dry while the note that a place is free waits behind data that goes the same way. On
# loopback each chunk costs 0.2 ms, so there are no more than eight.
_CHUNK_BYTES, _MOST_CHUNKS, _PLACES_PER_SOURCE = 128 * 1024, 8, 3


class Pairs:
    """The connections between all pairs of ranks of one gloo group.

    Args:
        group: A process group with a gloo backend that this rank belongs to.

    Attributes:
        num_drawn: Number of tags that were drawn; the same on all ranks.
    """

    def __init__(self, group: OpenGroup) -> None:
        self._group = group
        self.num_drawn = 0
        rank, size = group.get().rank(), group.get().size()
        self.sources = [(rank - step) % size for step in range(1, size)]
        # Each rank begins with another one, so that no link has to take in everything at once.
        self.targets = [(rank + step) % size for step in range(1, size)]

    def channel(self, kind: int) -> Channel:
        """The connections for one operation, with a tag of its own; see `tag`."""
        backend = self._group.get()._get_backend(torch.device("cpu"))
        return Channel(backend, self.tag(kind))

    def tag(self, kind: int) -> int:
        """A tag for one operation; called in the same order on all ranks.

        Operations of different kinds that meet by mistake never match: that ends in a time-out, and
        not with the numbers of one in the memory of the other.

        Args:
            kind: 0 for a gather, 1 for a sum.
        """
        tag = _FIRST_TAG + (2 * self.num_drawn + kind) % _NUM_TAGS
        self.num_drawn += 1
        return tag

    def skip(self) -> None:
        """Draw the tag of an operation that goes another way, or was refused. Local."""
        self.num_drawn += 1

    def wait(self, works: list[dist.Work]) -> None:
        """Wait for works and forget those that have ended.

        Raises:
            RuntimeError: A peer has gone, the group's time is up, or the group was aborted.
        """
        while works:
            # An abort is told by the result alone.
            if not works[0].wait():
                raise RuntimeError("The process group was aborted while a transfer was on its way")
            del works[0]


class Channel:
    """What one operation sends and receives by; made by `Pairs.channel`.

    It keeps the connections until the operation has ended. So one that is in flight when its group
    is closed ends well on all ranks, although it has still to post something.
    """

    def __init__(self, backend: Any, tag: int) -> None:
        self._backend, self._tag = backend, tag

    def send(self, x: Tensor, target: int) -> dist.Work:
        """Start to send dense memory on the CPU."""
        work: dist.Work = self._backend.send([x], target, self._tag)
        return work

    def receive(self, x: Tensor, source: int) -> dist.Work:
        """Start to fill dense memory on the CPU."""
        work: dist.Work = self._backend.recv([x], source, self._tag)
        return work


class PairwiseAllGather:
    """An operation that fills all parts but this rank's with what the others hold in theirs.

    Args:
        pairs: Connections between all pairs of ranks.
        own_L: Tensor that this rank sends to all; dense and on the CPU.
        parts_NL: Tensor to fill for each rank; lengths may differ, and be 0.
    """

    def __init__(self, pairs: Pairs, own_L: Tensor, parts_NL: Sequence[Tensor]) -> None:
        self._pairs, self._own_L, self._parts_NL = pairs, own_L, parts_NL
        self._channel = pairs.channel(0)
        self._works: list[dist.Work] = []

    def begin(self) -> bool:
        """Post all receives, then all sends; nothing is left to post then."""
        channel, parts_NL = self._channel, self._parts_NL
        for source in self._pairs.sources:
            if parts_NL[source].numel():
                self._works.append(channel.receive(parts_NL[source], source))
        if self._own_L.numel():
            self._works += [channel.send(self._own_L, target) for target in self._pairs.targets]
        return True

    def finish(self, has_announced: Callable[[], None]) -> None:
        """Wait for them."""
        self._pairs.wait(self._works)


class PairwiseReduceScatter:
    """An operation that adds what the other ranks have for this one to its own part.

    It receives chunk by chunk, and a few chunks ahead. Formats of 16 bits are added in fp32 and
    rounded once.

    Args:
        pairs: Connections between all pairs of ranks.
        parts_NL: Tensor that this rank sends to each rank; dense and on the CPU. Lengths may
            differ, and be 0. The one of this rank is not read.
        total_L: Tensor with this rank's own part, and then the sum; it may lie in `parts_NL`.
    """

    def __init__(self, pairs: Pairs, parts_NL: Sequence[Tensor], total_L: Tensor) -> None:
        self._pairs, self._parts_NL = pairs, parts_NL
        self._channel = pairs.channel(1)
        self._is_narrow = total_L.is_floating_point() and total_L.itemsize < 4
        self._chunks = _chunks(total_L)
        # A chunk from all ranks before the next one, so that it is summed in one go.
        self._to_come = deque((chunk, rank) for chunk in self._chunks for rank in pairs.sources)
        self._places: deque[Tensor] = deque()
        self._receives: deque[tuple[dist.Work, Tensor]] = deque()
        self._sends: list[dist.Work] = []

    def begin(self) -> bool:
        """Post the first receives, then all sends."""
        num_places = min(_PLACES_PER_SOURCE * len(self._pairs.sources), len(self._to_come))
        self._places.extend(torch.empty_like(self._chunks[0]) for _ in range(num_places))
        while self._places and self._to_come:
            self._receive()
        for target in self._pairs.targets:
            for chunk in _chunks(self._parts_NL[target]):
                self._sends.append(self._channel.send(chunk, target))
        return not self._to_come

    def finish(self, has_announced: Callable[[], None]) -> None:
        """Add chunks as they come, posting a further receive for each."""
        for chunk in self._chunks:
            total = chunk.float() if self._is_narrow else chunk
            for _ in self._pairs.sources:
                work, place = self._receives[0]
                self._pairs.wait([work])
                self._receives.popleft()
                total.add_(place[: len(chunk)])
                self._places.append(place)
                if self._to_come:
                    self._receive()
                    if not self._to_come:
                        has_announced()
            if self._is_narrow:
                chunk.copy_(total)
        self._pairs.wait(self._sends)

    def _receive(self) -> None:
        (chunk, source), place = self._to_come.popleft(), self._places.popleft()
        work = self._channel.receive(place[: len(chunk)], source)
        self._receives.append((work, place))


def _chunks(part_L: Tensor) -> list[Tensor]:
    """The chunks that a part is sent in; they follow from its length, which both sides know."""
    if not part_L.numel():
        return []
    length = max(_CHUNK_BYTES // part_L.itemsize, -(-part_L.numel() // _MOST_CHUNKS))
    return list(part_L.view(-1).split(length))
