"""Gradients for any collectives: each operation with its adjoint.

The convention is the mathematical one: every rank has a loss of its own, and the gradient is
that of their sum. The adjoint of a gather is a reduce-scatter and the other way round, an
all-to-all is its own adjoint with the sizes swapped, and an all-reduce is its own adjoint.
Where a value is *the same* on all ranks and its loss is counted once, as in tensor-parallel
layers, use the regions of `pcomm.core.tensor_parallel` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.protocol import Collectives, Pending, Reduction
from pcomm.core.errors import UnsupportedError

__all__ = ["DifferentiableCollectives", "differentiable"]


def differentiable(collectives: Collectives) -> Collectives:
    """`collectives` with gradients; itself where there is one rank, which needs no function."""
    return collectives if collectives.size == 1 else DifferentiableCollectives(collectives)


class DifferentiableCollectives(Handle):
    """`Collectives` whose results carry gradients; backward communicates through `inner` too.

    `out` is refused: a result written over an existing tensor has no place in a graph. An
    asynchronous operation enters the graph when it is waited for, and its backward blocks.

    Args:
        inner: The collectives that move the tensors.
    """

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks; backward is a reduce-scatter."""
        _refuse("all_gather", out)
        return with_adjoint(
            x,
            lambda x: self.inner.all_gather(x, dim=dim, sizes=sizes),
            lambda gradient: self.reduce_scatter(gradient, dim=dim, sizes=sizes),
        )

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_gather`."""
        _refuse("all_gather_async", out)
        return _later(
            x,
            self.inner.all_gather_async(x.detach(), dim=dim, sizes=sizes),
            lambda gradient: self.reduce_scatter(gradient, dim=dim, sizes=sizes),
        )

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of the sum; backward is an all-gather."""
        _refuse("reduce_scatter", out)
        return with_adjoint(
            x,
            lambda x: self.inner.reduce_scatter(x, dim=dim, sizes=sizes),
            lambda gradient: self.all_gather(gradient, dim=dim, sizes=sizes),
        )

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start a `reduce_scatter`."""
        _refuse("reduce_scatter_async", out)
        return _later(
            x,
            self.inner.reduce_scatter_async(x.detach(), dim=dim, sizes=sizes),
            lambda gradient: self.all_gather(gradient, dim=dim, sizes=sizes),
        )

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum over all ranks; backward sums the gradients of all ranks."""
        _refuse("all_reduce", out)
        _refuse_max(op)
        return with_adjoint(x, self.inner.all_reduce, self.all_reduce)

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Start an `all_reduce`."""
        _refuse("all_reduce_async", out)
        _refuse_max(op)
        return _later(x, self.inner.all_reduce_async(x.detach()), self.all_reduce)

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """The parts received; backward sends their gradients back."""
        _refuse("all_to_all", out)
        return with_adjoint(
            x,
            lambda x: self.inner.all_to_all(
                x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim
            ),
            lambda gradient: self.all_to_all(
                gradient, send_sizes=receive_sizes, receive_sizes=send_sizes, dim=dim
            ),
        )

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
        _refuse("all_to_all_async", out)
        return _later(
            x,
            self.inner.all_to_all_async(
                x.detach(), send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim
            ),
            lambda gradient: self.all_to_all(
                gradient, send_sizes=receive_sizes, receive_sizes=send_sizes, dim=dim
            ),
        )

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of `source`, whose gradient is the sum over ranks; the others' is zero."""
        _refuse("broadcast", out)
        return with_adjoint(
            x,
            lambda x: self.inner.broadcast(x, source=source),
            lambda gradient: self._to_source(gradient, source),
        )

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`."""
        _refuse("broadcast_async", out)
        return _later(
            x,
            self.inner.broadcast_async(x.detach(), source=source),
            lambda gradient: self._to_source(gradient, source),
        )

    def _to_source(self, gradient: Tensor, source: int) -> Tensor:
        total = self.all_reduce(gradient)
        return total if self.rank == source else torch.zeros_like(total)


def _later(x: Tensor, pending: Pending, adjoint: Callable[[Tensor], Tensor]) -> Pending:
    return Pending(lambda: with_adjoint(x, lambda _: pending.wait(), adjoint))


def _refuse(name: str, out: Tensor | None) -> None:
    if out is not None:
        raise UnsupportedError(
            f"{name}: out={tuple(out.shape)}",
            found="differentiable collectives",
            why="A result written over an existing tensor cannot carry a gradient.",
            fix="Leave out away, or use the group's plain collectives.",
        )


def _refuse_max(op: Reduction) -> None:
    if op != "sum":
        raise UnsupportedError(
            f"all_reduce: op={op!r}",
            found="differentiable collectives",
            why="Only a sum over ranks has a gradient that is again a collective.",
            fix="Use the group's plain collectives for a maximum, outside the graph.",
        )
