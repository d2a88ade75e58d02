"""The operations of a group of ranks, as features and models see them.

Whoever needs communication takes a `Collectives` as an argument. What stands behind it (nothing
at all on one rank, torch.distributed, a counting spy, NVLink multicast) is decided where the
groups are made, and never looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

__all__ = ["Collectives", "Pending", "Reduction", "TellsItsEnd"]

Reduction = Literal["sum", "max"]


@runtime_checkable
class TellsItsEnd(Protocol):
    """An operation that is running, or has ended."""

    def on_done(self, call: Callable[[], None]) -> bool:
        """See `Pending.on_done`."""
        ...


class Pending:
    """A result that is still on its way; `wait` returns it.

    Local: only this rank waits. Every pending result must be waited for once before its
    tensors are read or freed; a second `wait` returns the same tensor at once.

    Args:
        finish: Waits for the operation and returns its result.
        work: Torch's handle of the operation, or whatever else tells when it has ended, such as
            another pending result of it; None where the host cannot see that, as on a GPU.
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
        """A result that is there already. Local."""
        pending = cls(lambda: result)
        pending.wait()
        return pending

    def wait(self) -> Tensor:
        """Block until the operation has finished and return its result."""
        if self._finish is not None:
            self._result, self._finish, self._work = self._finish(), None, None
        assert self._result is not None
        return self._result

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called once the operation has ended, whether or not anybody waits. Local.

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


class Collectives(Protocol):
    """Operations over the ranks of one group; every rank calls them in the same order.

    `dim` is the tensor dimension along which shards lie (it may be negative). `sizes` gives
    each rank's length along `dim` where they are uneven; without it all are equal. Each
    operation has a twin ending in `_async` that returns a `Pending` at once.

    Results are new tensors unless `out` is given. With one rank the result is the input itself.
    `x` may have any strides.

    `out` has the shape of the result, and dtype and device of `x`. It may have any strides and lie
    over `x`, in whole or in part; a result in `out` carries no gradient. While an operation is on
    its way neither `out` nor `x` may be written to, and `out` not be read.

    Sizes and an `out` that do not fit raise `LayoutError` before anything is sent.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks, in rank order along `dim`."""
        ...

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_gather`."""
        ...

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard along `dim` of the sum of `x` over all ranks."""
        ...

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start a `reduce_scatter`."""
        ...

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum of `x` over all ranks; `out=x` works in place.

        Of booleans the sum is "any". Whether a maximum carries a NaN depends on the backend: on
        gloo the NaN of one rank can be lost.
        """
        ...

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Start an `all_reduce`."""
        ...

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
        ...

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
        ...

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of the rank at place `source`; all ranks pass the same shape; `out=x` in place."""
        ...

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`."""
        ...
