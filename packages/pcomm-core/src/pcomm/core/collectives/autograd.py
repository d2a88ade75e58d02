"""Gradients through collectives: each linear operation with its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.checks import check_reduction
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Call, Collectives, OperationName, Pending
from pcomm.core.errors import PcommError, UnsupportedError

__all__ = ["DifferentiableCollectives", "differentiable", "with_adjoint", "with_adjoints"]


def differentiable(collectives: Collectives) -> Collectives:
    """`collectives` with gradients; itself where there is one rank, which needs no function."""
    return collectives if collectives.size == 1 else DifferentiableCollectives(collectives)


_ADJOINTS: dict[OperationName, OperationName] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    # For the source; the gradient of the other ranks, whose inputs have no part in it, is zero.
    "broadcast": "all_reduce",
}


class DifferentiableCollectives(InstrumentedCollectives):
    """`Collectives` whose results carry gradients; backward communicates through `inner` too.

    `out` is refused: a result written over an existing tensor has no place in a graph. An
    asynchronous operation enters the graph when it is waited for, and its backward blocks.

    Args:
        inner: Collectives that move the tensors.
    """

    def run(self, call: Call) -> Tensor:
        """The result of an operation, with its gradient."""
        self._check(call, "")
        # Autograd hands on the input itself, unless a transform of torch stands between.
        return with_adjoint(
            call.x,
            lambda x: self.inner.run(call if x is call.x else call.with_input(x)),
            self._adjoint(call),
        )

    def start(self, call: Call) -> Pending:
        """Start an operation; waiting for it puts its result into the graph."""
        self._check(call, "_async")
        x, adjoint = call.x, self._adjoint(call)
        pending = self.inner.start(call.with_input(x.detach()))
        return pending.around(lambda: with_adjoint(x, lambda _: pending.wait(), adjoint))

    def _check(self, call: Call, suffix: str) -> None:
        try:
            _refuse_what_has_none(call, suffix)
        except PcommError:
            self.skip(call.operation)
            raise

    def _adjoint(self, call: Call) -> Callable[[Tensor], Tensor]:
        """The backward of a call; it refers to no tensor of that."""
        operation, dim, sizes, receive_sizes = _ADJOINTS[call.operation], call.dim, call.sizes, None
        if operation == "all_to_all":
            sizes, receive_sizes = call.receive_sizes, sizes
        is_source = call.operation != "broadcast" or self.rank == call.source

        def backward(gradient: Tensor) -> Tensor:
            total = self.run(Call(operation, gradient, None, dim, sizes, receive_sizes))
            return total if is_source else torch.zeros_like(total)

        return backward


def _refuse_what_has_none(call: Call, suffix: str) -> None:
    """Refuse what cannot carry a gradient; `suffix` is that of the method that was called."""
    if call.out is not None:
        raise UnsupportedError(
            f"{call.operation}{suffix}: out={tuple(call.out.shape)}",
            found="differentiable collectives",
            why="A result written over an existing tensor cannot carry a gradient.",
            fix="Leave out away, or use the group's plain collectives.",
        )
    check_reduction(call.op)
    if call.op != "sum":
        raise UnsupportedError(
            f"all_reduce: op={call.op!r}",
            found="differentiable collectives",
            why="Only a sum over ranks has a gradient that is again a collective.",
            fix="Use the group's plain collectives for a maximum, outside the graph.",
        )


def with_adjoint(
    x: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """`run(x)`, whose backward passes the gradient through `adjoint`.

    Args:
        x: Input tensor, of any shape.
        run: Linear operation; it is executed without recording.
        adjoint: Transpose of `run`, from gradients of the result to gradients of `x`. It is itself
            recorded when a second derivative is asked for.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return run(x)
    result: Tensor = _Linear.apply(run, adjoint, x)  # type: ignore[no-untyped-call]
    return result


def with_adjoints(
    tensors: tuple[Tensor, ...],
    run: Callable[..., tuple[Tensor, ...]],
    adjoint: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """`run(*tensors)`, as `with_adjoint` for several tensors and results.

    Args:
        tensors: Any tensors.
        run: A linear operation; it is executed without recording.
        adjoint: Transpose of that operation, from the gradients of all results, with zeros for
            results that are not used, to those of all tensors.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return run(*tensors)
    results: tuple[Tensor, ...] = _Linear.apply(run, adjoint, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensor | tuple[Tensor, ...]],
        adjoint: Callable[..., Tensor | tuple[Tensor, ...]],
        *tensors: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.adjoint = adjoint
        result = run(*tensors)
        if isinstance(result, tuple):
            return tuple(_new(one, tensors) for one in result)
        return _new(result, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result = ctx.adjoint(*gradients)
        return None, None, *(result if isinstance(result, tuple) else (result,))


def _new(result: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    # Autograd wants a new tensor object even where the operation has nothing to do.
    return result.view_as(result) if any(result is x for x in tensors) else result
