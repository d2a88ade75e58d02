"""Collectives over a process group of torch, refused once it is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.checks import (
    check_out,
    check_reduction,
    check_source,
    deliver,
    gather_sizes,
    is_dense,
    not_over,
    scatter_sizes,
    transfer_sizes,
)
from pcomm.core.collectives.protocol import (
    Call,
    Collectives,
    Handle,
    OperationName,
    Pending,
    Reduction,
)
from pcomm.core.errors import ClosedError

__all__ = ["DistributedCollectives", "Issued", "OpenGroup", "in_front"]


Issued = tuple[Any, tuple[Tensor, ...], Tensor | Callable[[], Tensor]]
"""An operation in flight.

- Its handle; None if it has ended.
- The tensors that it reads and writes, which have to live until it has ended.
- Its result with `dim` first, or the function that computes that once it has ended. The tensor is
  the `out` of the call itself if the result was written there.
"""


class DistributedCollectives(Handle, Collectives):
    """The `Collectives` of one torch process group; results carry no gradient.

    Args:
        process_group: A group that this rank belongs to.

    Attributes:
        is_seen_by_host: True if the host sees the end of an operation. On NCCL a handle is done as
            soon as the operation is queued on the device.
    """

    is_seen_by_host = False

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = OpenGroup(process_group)
        # Plain integers: asking the process group costs as much as the rest of a call.
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        # Torch 2.13 renamed these two, and warns at each call by the old name.
        self._gather: Callable[..., Any] = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )
        self._scatter: Callable[..., Any] = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group.

        Raises:
            ClosedError: It was closed.
        """
        return self._group.get()

    def rest(self) -> None:
        """End threads that have nothing to do; the next operation begins one again. Local."""

    def close(self) -> None:
        """Refuse all further operations. Local; closing the process group is its owner's."""
        self._group.close()

    def abandon(self) -> None:
        """Refuse all further operations, and to wait for those in flight. Local."""
        self._group.abandon()

    def run(self, call: Call) -> Tensor:
        """The result of an operation, once it has ended; on NCCL, once it is queued."""
        return _finished(self._issued(call, False), call.dim, call.out)

    def start(self, call: Call) -> Pending:
        """Issue an operation and return at once."""
        # Not the call, which would keep its input alive.
        issued, dim, out = self._issued(call, True), call.dim, call.out
        work, polled = (issued[0], None) if self.is_seen_by_host else (None, issued[0])
        group, stream = self._group, _stream_of(call.x)

        def finish() -> Tensor:
            if isinstance(issued[0], dist.Work):
                group.check_wait(issued[0])
            result = _finished(issued, dim, out)
            if stream is not None:
                _keep_for_waiter(issued[1], stream)
            return result

        return Pending(finish, work, polled=polled)

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum of `x` over all ranks; `out=x` works in place."""
        # The most frequent call of training costs what torch's own does.
        if out is x and is_dense(x):
            try:
                dist.all_reduce(x, self._operation(op, x), self._group.get())
            except Exception:
                self.skip("all_reduce")
                raise
            return x
        return super().all_reduce(x, op=op, out=out)

    def skip(self, operation: OperationName) -> None:
        """Count an operation that this rank was refused; here no other can be made then. Local.

        A backend matches the operations of a communicator by their order.
        """
        self._group.refuse_after(operation)

    def _issued(self, call: Call, is_async: bool) -> Issued:
        """An operation in flight; also one that fails before it is counts on all ranks."""
        try:
            return self._issue(call, is_async)
        except Exception:
            self.skip(call.operation)
            raise

    # A blocking call asks torch for a blocking operation too, which spares NCCL an event.

    def _issue(self, call: Call, is_async: bool) -> Issued:
        match call.operation:
            case "all_gather":
                return self._all_gather(call, is_async)
            case "reduce_scatter":
                return self._reduce_scatter(call, is_async)
            case "all_reduce":
                return self._all_reduce(call, is_async)
            case "all_to_all":
                return self._all_to_all(call, is_async)
            case "broadcast":
                return self._broadcast(call, is_async)

    def _all_gather(self, call: Call, is_async: bool) -> Issued:
        length, uneven = gather_sizes(call, self.rank, self.size)
        gathered, front = check_out(call, length), in_front(call)
        if uneven is not None:
            return self._gather_padded(front, uneven, gathered, is_async)
        if gathered is None:
            gathered = front.new_empty(length, *front.shape[1:])
        else:
            # Its own place in `out` is where the input may lie.
            front = not_over(front, gathered, self.rank * front.nbytes)
        work = self._gather(gathered, front, self._group.get(), is_async)
        return work, (front, gathered), gathered

    def _gather_padded(
        self, front: Tensor, lengths: Sequence[int], target: Tensor | None, is_async: bool
    ) -> Issued:
        """An all-gather of shards padded to the longest: torch gathers equal ones alone."""
        longest = max(lengths)
        front = torch.cat([front, front.new_zeros(longest - front.shape[0], *front.shape[1:])])
        gathered = front.new_empty(longest * self.size, *front.shape[1:])
        work = self._gather(gathered, front, self._group.get(), is_async)

        def join() -> Tensor:
            padded = zip(gathered.split(longest), lengths, strict=True)
            return torch.cat([shard[:length] for shard, length in padded], out=target)

        return work, (front, gathered), join

    def _reduce_scatter(self, call: Call, is_async: bool) -> Issued:
        length, uneven = scatter_sizes(call, self.rank, self.size)
        if uneven is not None:
            return self._exchange_and_add(call, is_async)
        shard, front = check_out(call, length), in_front(call)
        if shard is None:
            shard = front.new_empty(length, *front.shape[1:])
        else:
            # Its own part is where the result may lie.
            front = not_over(front, shard, -self.rank * shard.nbytes)
        operation = self._operation("sum", front)
        work = self._scatter(shard, front, operation, self._group.get(), is_async)
        return work, (front, shard), shard

    def _exchange_and_add(self, call: Call, is_async: bool) -> Issued:
        """A reduce-scatter by an all-to-all and a local sum, for shards of any length."""
        length, uneven = scatter_sizes(call, self.rank, self.size)
        target, front = check_out(call, length), in_front(call)
        shape = [length, *front.shape[1:]]
        parts = front.new_empty([self.size, *shape])
        work = dist.all_to_all_single(
            parts.view(self.size * length, *shape[1:]),
            front,
            [length] * self.size,
            [length] * self.size if uneven is None else list(uneven),
            self._group.get(),
            is_async,
        )

        def add() -> Tensor:
            # The dtype is named because torch.sum widens small integers.
            total: Tensor = torch.sum(parts, 0, dtype=parts.dtype, out=target)
            return total

        return work, (front, parts), add

    def _all_reduce(self, call: Call, is_async: bool) -> Issued:
        # Made contiguous before and returned after: torch reduces only dense memory, and a view
        # handed back unreduced is the classic mistake here (Megatron-LM #5338).
        operation, total = self._operation(call.op, call.x), _own_copy(call)
        work = dist.all_reduce(total, operation, self._group.get(), is_async)
        return work, (total,), total

    def _all_to_all(self, call: Call, is_async: bool) -> Issued:
        length, sent, received = transfer_sizes(call, self.rank, self.size)
        target, front = check_out(call, length), in_front(call)
        if target is None:
            target = front.new_empty(length, *front.shape[1:])
        else:
            front = not_over(front, target)
        work = dist.all_to_all_single(target, front, received, sent, self._group.get(), is_async)
        return work, (front, target), target

    def _broadcast(self, call: Call, is_async: bool) -> Issued:
        check_source(call, self.size)
        target = _own_copy(call)
        work = dist.broadcast(
            target, group=self._group.get(), async_op=is_async, group_src=call.source
        )
        return work, (target,), target

    def _operation(self, op: Reduction, x: Tensor) -> Any:
        """Torch's name of a reduction; refuses one that is unknown, or not made of this dtype."""
        if op not in self._operations:
            check_reduction(op)
        # Gloo adds booleans as bytes, and two times true is then no boolean any more.
        return self._operations["max" if x.dtype == torch.bool else op]


def _stream_of(x: Tensor) -> torch.Stream | None:
    """The stream on which operations of `x` are issued; None on a CPU."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def _keep_for_waiter(tensors: Sequence[Tensor], issued_on: torch.Stream) -> None:
    """Have memory of `issued_on` outlive what the stream that has waited does with it. Local.

    Torch's allocator gives memory to the next tensor of the stream that it was made on, which need
    not have waited for the operation. The stream that has waited comes behind it.
    """
    waited_on = _stream_of(tensors[0])
    if waited_on is None or waited_on == issued_on:
        return
    for tensor in tensors:
        tensor.record_stream(waited_on)


def _finished(issued: Issued, dim: int, out: Tensor | None) -> Tensor:
    """Wait for an operation; returns its result in the place that the call names."""
    work, _, found = issued
    if work is not None:
        work.wait()
    result = found if isinstance(found, Tensor) else found()
    is_there = result is out or (out is None and dim == 0)
    return result if is_there else deliver(result.movedim(0, dim), out)


def in_front(call: Call) -> Tensor:
    """The input dense, without gradient and with `dim` first; itself where it is all that."""
    x, dim = call.x, call.dim
    if dim == 0 and is_dense(x):
        return x
    if x.requires_grad:
        x = x.detach()
    x = _plain(x)
    if dim != 0:
        x = x.movedim(dim, 0)
    return x.contiguous()


def _plain(x: Tensor) -> Tensor:
    """`x`, whose memory holds its numbers and not their conjugates or negatives."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _own_copy(call: Call) -> Tensor:
    """What an operation in place may run on: `out` with the numbers of `x`, or a dense copy."""
    x, out = call.x, call.out
    if out is x and is_dense(x):
        return x
    target = check_out(call)
    if x.requires_grad:
        x = x.detach()
    if target is None:
        return _plain(x).clone(memory_format=torch.contiguous_format)
    return target.copy_(not_over(x, target))


class OpenGroup:
    """A weak reference to a process group, resolved when an operation is issued.

    Weak, so that a result, a hook or a model that outlives its groups keeps no connections and no
    polling threads.

    Args:
        process_group: A group that this rank belongs to.
    """

    __slots__ = ("_description", "_find", "_is_abandoned", "_skipped")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._find: Callable[[], dist.ProcessGroup | None] = weakref.ref(process_group)
        self._description = process_group.group_desc
        self._is_abandoned = False
        self._skipped = ""

    def get(self) -> dist.ProcessGroup:
        """The process group. Local.

        Raises:
            ClosedError: It was closed, or torch.distributed has ended; or an operation was refused
                here, and the backend cannot leave it out.
        """
        found = self._find()
        if found is None and self._skipped:
            raise ClosedError(
                f"an operation of the communicator {self._description!r}",
                found=f"an earlier {self._skipped} of it was refused on this rank",
                why="Other ranks may be in that operation, and the next one here would meet it.",
                fix="Mend the call that was refused; to go on after it, open new groups.",
            )
        if found is None:
            raise ClosedError(
                f"an operation of the communicator {self._description!r}",
                found="that communicator was closed",
                why="Closing the groups, or ending torch.distributed, ends its connections.",
                fix="Do it inside the `with` block of the groups, or open new ones.",
            )
        return found

    def close(self) -> None:
        """Refuse from now on. Local."""
        self._find = _nothing

    def abandon(self) -> None:
        """Refuse from now on, also to wait for what is in flight. Local."""
        self._find, self._is_abandoned = _nothing, True

    def refuse_after(self, operation: str) -> None:
        """Refuse from now on, since this rank has left out an operation. Local."""
        if self._find() is not None:
            self._find, self._skipped = _nothing, operation

    def check_wait(self, work: dist.Work) -> None:
        """Allow to wait for an operation that was issued before. Local.

        Raises:
            ClosedError: The group was abandoned while it was in flight. Torch's own error may come
                late: gloo ends an operation of which a message had arrived in part only when the
                time limit of the group is over.
        """
        if self._is_abandoned and not work.is_completed():
            raise self.left_in_flight()

    def left_in_flight(self) -> ClosedError:
        """The error of an operation that was in flight when the group was abandoned. Local."""
        return ClosedError(
            f"an operation of the communicator {self._description!r}",
            found="that communicator was abandoned while it was in flight",
            why="It may need a rank that is gone, so that waiting for it might never end.",
            fix="Discard its tensors, and repeat it with the groups of the next generation.",
        )


def _nothing() -> None:
    return None
