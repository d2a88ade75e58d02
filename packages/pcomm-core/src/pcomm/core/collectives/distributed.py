"""Collectives of a torch process group, without gradients.

Shards may lie along any dimension and be uneven; that is ours, all else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.open_group import OpenGroup
from pcomm.core.collectives.out import check_out, deliver, is_dense, not_over
from pcomm.core.collectives.protocol import Pending, Reduction
from pcomm.core.collectives.shapes import (
    gather_sizes,
    scatter_sizes,
    transfer_sizes,
    with_length,
)

__all__ = ["DistributedCollectives", "Started", "in_front"]

Started = tuple[Callable[[], Tensor], Any]
"""What ends an operation and returns its result, and a handle of it while it runs."""


class DistributedCollectives(Handle):
    """The `Collectives` of one torch process group; results carry no gradient.

    Args:
        process_group: A group that this rank belongs to.

    Attributes:
        is_seen_by_host: Whether the end of an operation is seen by the host. On NCCL a handle is
            done as soon as the operation is queued on the device.
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

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks, in rank order along `dim`."""
        return self._all_gather(x, dim, sizes, out, False)[0]()

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_gather`."""
        return self._pending(*self._all_gather(x, dim, sizes, out, True))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard along `dim` of the sum of `x` over all ranks."""
        return self._reduce_scatter(x, dim, sizes, out, False)[0]()

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start a `reduce_scatter`."""
        return self._pending(*self._reduce_scatter(x, dim, sizes, out, True))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum of `x` over all ranks; `out=x` works in place."""
        if out is x and is_dense(x):
            dist.all_reduce(x, self._operation(op, x), self._group.get())
            return x
        return self._all_reduce(x, op, out, False)[0]()

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Start an `all_reduce`."""
        return self._pending(*self._all_reduce(x, op, out, True))

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Part i of `x` along `dim` goes to rank i; the parts received, in rank order."""
        return self._all_to_all(x, send_sizes, receive_sizes, dim, out, False)[0]()

    def all_to_all_async(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_to_all`."""
        return self._pending(*self._all_to_all(x, send_sizes, receive_sizes, dim, out, True))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of the rank at place `source`."""
        return self._broadcast(x, source, out, False)[0]()

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`."""
        return self._pending(*self._broadcast(x, source, out, True))

    def _operation(self, op: Reduction, x: Tensor) -> Any:
        # Gloo adds booleans as bytes, and two times true is then no boolean any more.
        return self._operations["max" if x.dtype == torch.bool else op]

    def _pending(self, finish: Callable[[], Tensor], work: Any) -> Pending:
        return Pending(finish, work if self.is_seen_by_host else None)

    # Each of these starts an operation and returns what ends it, with torch's handle. A blocking
    # call ends at once; it asks torch for a blocking operation too, which spares NCCL an event.

    def _all_gather(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, out: Tensor | None, is_async: bool
    ) -> Started:
        uneven = gather_sizes(x, dim, sizes, self.rank, self.size)
        length = x.shape[dim] * self.size if uneven is None else sum(uneven)
        check_out("all_gather", x, with_length(x, dim, length), out)
        front = in_front(x, dim)
        if uneven is not None:
            # Padded to the longest: torch gathers equal shards into one tensor.
            missing = max(uneven) - front.shape[0]
            front = torch.cat([front, front.new_zeros(missing, *front.shape[1:])])
        is_direct = dim == 0 and uneven is None
        if is_direct and out is not None and is_dense(out):
            gathered = out
            # Its own place in `out` is where the input may lie.
            if front.data_ptr() != out.data_ptr() + self.rank * front.nbytes:
                front = not_over(front, out)
        else:
            gathered = front.new_empty(front.shape[0] * self.size, *front.shape[1:])
        work = self._gather(gathered, front, self._group.get(), is_async)

        def finish() -> Tensor:
            _wait(work, front)
            if gathered is out or (is_direct and out is None):
                return gathered
            result = gathered
            if uneven is not None:
                parts = gathered.split(max(uneven))
                result = torch.cat([p[:n] for p, n in zip(parts, uneven, strict=True)])
            return deliver(result.movedim(0, dim), out)

        return finish, work

    def _reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, out: Tensor | None, is_async: bool
    ) -> Started:
        if scatter_sizes(x, dim, sizes, self.size) is not None:
            return self._exchange_and_add(x, dim, sizes, out, is_async)
        check_out("reduce_scatter", x, with_length(x, dim, x.shape[dim] // self.size), out)
        front = in_front(x, dim)
        is_direct = dim == 0 and (out is None or is_dense(out))
        if out is not None and is_direct:
            shard = out
            # Its own part is where the result may lie.
            if out.data_ptr() != front.data_ptr() + self.rank * out.nbytes:
                front = not_over(front, out)
        else:
            shard = front.new_empty(front.shape[0] // self.size, *front.shape[1:])
        work = self._scatter(shard, front, self._operation("sum", x), self._group.get(), is_async)

        def finish() -> Tensor:
            _wait(work, front)
            return shard if is_direct else deliver(shard.movedim(0, dim), out)

        return finish, work

    def _exchange_and_add(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, out: Tensor | None, is_async: bool
    ) -> Started:
        """A reduce-scatter by an all-to-all and a local sum, for shards of any length."""
        uneven = scatter_sizes(x, dim, sizes, self.size)
        length = x.shape[dim] // self.size if uneven is None else uneven[self.rank]
        check_out("reduce_scatter", x, with_length(x, dim, length), out)
        front = in_front(x, dim)
        shape = [length, *front.shape[1:]]
        is_direct = dim == 0 and (out is None or is_dense(out))
        pieces = front.new_empty([self.size, *shape])
        exchange = dist.all_to_all_single(
            pieces.view(self.size * length, *shape[1:]),
            front,
            [length] * self.size,
            [length] * self.size if uneven is None else list(uneven),
            self._group.get(),
            is_async,
        )

        def add() -> Tensor:
            _wait(exchange, front)
            # The dtype is named because torch.sum widens small integers.
            target = out if is_direct else None
            total = torch.sum(pieces, 0, dtype=front.dtype, out=target)
            return total if is_direct else deliver(total.movedim(0, dim), out)

        return add, exchange

    def _all_reduce(self, x: Tensor, op: Reduction, out: Tensor | None, is_async: bool) -> Started:
        # Made contiguous before and returned after: torch reduces only dense memory, and a view
        # handed back unreduced is the classic mistake here (Megatron-LM #5338).
        total = _own_copy("all_reduce", x, out)
        is_direct = total is out
        work = dist.all_reduce(total, self._operation(op, x), self._group.get(), is_async)

        def finish() -> Tensor:
            _wait(work, total)
            return total if is_direct else deliver(total, out)

        return finish, work

    def _all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None,
        receive_sizes: Sequence[int] | None,
        dim: int,
        out: Tensor | None,
        is_async: bool,
    ) -> Started:
        sent, received = transfer_sizes(x, dim, send_sizes, receive_sizes, self.rank, self.size)
        check_out("all_to_all", x, with_length(x, dim, sum(received)), out)
        front = in_front(x, dim)
        if dim == 0 and out is not None and is_dense(out):
            target = out
            front = not_over(front, out)
        else:
            target = front.new_empty(sum(received), *front.shape[1:])
        if send_sizes is None:
            work = dist.all_to_all_single(target, front, None, None, self._group.get(), is_async)
        else:
            work = dist.all_to_all_single(
                target, front, received, sent, self._group.get(), is_async
            )

        def finish() -> Tensor:
            _wait(work, front)
            if target is out or (dim == 0 and out is None):
                return target
            return deliver(target.movedim(0, dim), out)

        return finish, work

    def _broadcast(self, x: Tensor, source: int, out: Tensor | None, is_async: bool) -> Started:
        target = _own_copy("broadcast", x, out)
        is_direct = target is out
        work = dist.broadcast(target, group=self._group.get(), async_op=is_async, group_src=source)

        def finish() -> Tensor:
            _wait(work, target)
            return target if is_direct else deliver(target, out)

        return finish, work


def in_front(x: Tensor, dim: int) -> Tensor:
    """`x` dense, without gradient and with `dim` first; `x` itself where it is all that."""
    if x.requires_grad:
        x = x.detach()
    x = _plain(x)
    if dim != 0:
        x = x.movedim(dim, 0)
    return x if x.is_contiguous() else x.contiguous()


def _wait(work: Any, _keep_alive: Tensor) -> None:
    """Wait for an asynchronous operation; the tensor that it reads must live until then."""
    if work is not None:
        work.wait()


def _plain(x: Tensor) -> Tensor:
    """`x`, whose memory holds its numbers and not their conjugates or negatives."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _own_copy(name: str, x: Tensor, out: Tensor | None) -> Tensor:
    """What an operation in place may run on: `out` with the numbers of `x`, or a dense copy."""
    check_out(name, x, x.shape, out)
    if out is None or not is_dense(out):
        return _plain(x.detach()).clone(memory_format=torch.contiguous_format)
    return out if out is x else out.copy_(not_over(x.detach(), out))
