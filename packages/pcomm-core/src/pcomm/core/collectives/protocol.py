"""The operations of a group of ranks, as features and models see them.

Code that communicates takes a `Collectives` as an argument. Its implementation (nothing at all on
one rank, torch.distributed, a counting spy, NVLink multicast) is chosen where the groups are
opened. A new implementation subclasses `Collectives` and writes two methods, `run` and `start`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.call import Call, Reduction

__all__ = ["Collectives", "Pending", "TellsItsEnd"]


@runtime_checkable
class TellsItsEnd(Protocol):
    """An operation that is in flight, or has ended."""

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called at the end of the operation, as `Pending.on_done` does."""
        ...


class Pending:
    """The result of an operation in flight; `wait` returns it.

    Local: only this rank waits. Every pending result must be waited for once before its
    tensors are read or freed; a second `wait` returns the same tensor at once.

    Args:
        finish: Function that waits for the operation and returns its result.
        work: Handle that tells when the operation has ended: torch's, or another pending result
            of the same operation. None where the host cannot see the end, as on a GPU.
    """

    __slots__ = ("_finish", "_result", "_work")

    def __init__(
        self, finish: Callable[[], Tensor], work: dist.Work | TellsItsEnd | None = None
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._work = work
        self._result: Tensor | None = None

    @classmethod
    def ready(cls, result: Tensor) -> Pending:
        """A pending result of an operation that has ended. Local."""
        pending = cls.__new__(cls)
        pending._finish, pending._work, pending._result = None, None, result
        return pending

    def wait(self) -> Tensor:
        """Block until the operation has finished and return its result."""
        if self._finish is not None:
            self._result, self._finish, self._work = self._finish(), None, None
        assert self._result is not None
        return self._result

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called at the end of the operation, also if `wait` is never called. Local.

        It runs on another thread, before `wait` returns, or here if the operation has ended
        already; what it raises is lost. The local work that `wait` may do afterwards, such as the
        sum of a reduce-scatter on gloo, is not part of the operation.

        Returns:
            False where the end cannot be seen; then `call` is not called.
        """
        if self._finish is None:
            call()
        elif self._work is None:
            return False
        elif isinstance(self._work, TellsItsEnd):
            return self._work.on_done(call)
        else:
            self._work.get_future().add_done_callback(lambda _: call())
        return True

    def around(self, finish: Callable[[], Tensor]) -> Pending:
        """The same operation, waited for by `finish`, which waits for this one. Local."""
        return Pending(finish, self)


class Collectives(ABC):
    """Operations over the ranks of one group; every rank calls them in the same order.

    `dim` is the tensor dimension along which shards lie (it may be negative). `sizes` gives
    each rank's length along `dim` where they are uneven; without it all are equal. Each
    operation has a twin ending in `_async` that returns a `Pending` at once.

    Results are new tensors unless `out` is given. With one rank the result is the input itself.
    `x` may have any strides.

    `out` has the shape of the result, and dtype and device of `x`. It may have any strides and lie
    over `x`, in whole or in part; a result in `out` carries no gradient. While an operation is in
    flight neither `out` nor `x` may be written to, and `out` not be read.

    Sizes and an `out` that do not fit raise `LayoutError` before anything is sent.

    The named methods make a `Call` and pass it to `run` or `start`, which subclasses write.

    Attributes:
        rank: Place of this rank in the group.
        size: Number of ranks in the group.
    """

    rank: int
    size: int

    @abstractmethod
    def run(self, call: Call) -> Tensor:
        """The result of an operation. Collective: all ranks of the group make the same call."""

    @abstractmethod
    def start(self, call: Call) -> Pending:
        """Start an operation and return at once. Collective: all ranks make the same call."""

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks, in rank order along `dim`."""
        return self.run(Call("all_gather", x, out, dim, sizes))

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_gather`."""
        return self.start(Call("all_gather", x, out, dim, sizes))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard along `dim` of the sum of `x` over all ranks."""
        return self.run(Call("reduce_scatter", x, out, dim, sizes))

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start a `reduce_scatter`."""
        return self.start(Call("reduce_scatter", x, out, dim, sizes))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum of `x` over all ranks; `out=x` works in place.

        The sum of booleans is "any". Whether a maximum carries a NaN depends on the backend: on
        gloo the NaN of one rank can be lost.
        """
        return self.run(Call("all_reduce", x, out, op=op))

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Start an `all_reduce`."""
        return self.start(Call("all_reduce", x, out, op=op))

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
        return self.run(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

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
        return self.start(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of the rank at place `source`; all ranks pass the same shape; `out=x` in place."""
        return self.run(Call("broadcast", x, out, source=source))

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`."""
        return self.start(Call("broadcast", x, out, source=source))
