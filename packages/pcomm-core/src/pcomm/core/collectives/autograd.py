"""Gradients for any collectives: each operation with its adjoint.

The convention is the mathematical one: every rank has a loss of its own, and the gradient is
that of their sum. The adjoint of a gather is a reduce-scatter and the other way round, an
all-to-all is its own adjoint with the sizes swapped, and an all-reduce is its own adjoint.
Where a value is *the same* on all ranks and its loss is counted once, as in tensor-parallel
layers, use the mappings of `pcomm.core.tensor_parallel` instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.call import Call
from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.errors import UnsupportedError

__all__ = ["DifferentiableCollectives", "differentiable"]


def differentiable(collectives: Collectives) -> Collectives:
    """`collectives` with gradients; itself where there is one rank, which needs no function."""
    return collectives if collectives.size == 1 else DifferentiableCollectives(collectives)


class DifferentiableCollectives(Handle, Collectives):
    """`Collectives` whose results carry gradients; backward communicates through `inner` too.

    `out` is refused: a result written over an existing tensor has no place in a graph. An
    asynchronous operation enters the graph when it is waited for, and its backward blocks.

    Args:
        inner: Collectives that move the tensors.
    """

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    def run(self, call: Call) -> Tensor:
        """The result of an operation, with its gradient."""
        _refuse(call, call.operation)
        return with_adjoint(
            call.x, lambda x: self.inner.run(call.with_input(x)), self._adjoint(call)
        )

    def start(self, call: Call) -> Pending:
        """Start an operation; waiting for it puts its result into the graph."""
        _refuse(call, f"{call.operation}_async")
        x, adjoint = call.x, self._adjoint(call)
        pending = self.inner.start(call.with_input(x.detach()))
        return Pending(lambda: with_adjoint(x, lambda _: pending.wait(), adjoint))

    def _adjoint(self, call: Call) -> Callable[[Tensor], Tensor]:
        """The operation of the backward; it holds no tensor of `call`."""
        dim, sizes, receive_sizes, source = call.dim, call.sizes, call.receive_sizes, call.source
        match call.operation:
            case "all_gather":
                return lambda gradient: self.reduce_scatter(gradient, dim=dim, sizes=sizes)
            case "reduce_scatter":
                return lambda gradient: self.all_gather(gradient, dim=dim, sizes=sizes)
            case "all_reduce":
                return self.all_reduce
            case "all_to_all":
                return lambda gradient: self.all_to_all(
                    gradient, send_sizes=receive_sizes, receive_sizes=sizes, dim=dim
                )
            case "broadcast":
                return lambda gradient: self._to_source(gradient, source)

    def _to_source(self, gradient: Tensor, source: int) -> Tensor:
        total = self.all_reduce(gradient)
        return total if self.rank == source else torch.zeros_like(total)


def _refuse(call: Call, name: str) -> None:
    if call.out is not None:
        raise UnsupportedError(
            f"{name}: out={tuple(call.out.shape)}",
            found="differentiable collectives",
            why="A result written over an existing tensor cannot carry a gradient.",
            fix="Leave out away, or use the group's plain collectives.",
        )
    if call.op != "sum":
        raise UnsupportedError(
            f"all_reduce: op={call.op!r}",
            found="differentiable collectives",
            why="Only a sum over ranks has a gradient that is again a collective.",
            fix="Use the group's plain collectives for a maximum, outside the graph.",
        )
