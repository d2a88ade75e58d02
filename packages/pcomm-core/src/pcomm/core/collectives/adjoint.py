"""One autograd function for all communication: a linear operation and its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_adjoint", "with_adjoints"]


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
        adjoint: Its transpose, from the gradients of all results, with zeros for results that are
            not used, to those of all tensors.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return run(*tensors)
    results: tuple[Tensor, ...] = _Linear.apply(run, adjoint, *tensors)  # type: ignore[no-untyped-call]
    return results


def _new(result: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    # Autograd wants a new tensor object even where the operation has nothing to do.
    return result.view_as(result) if any(result is x for x in tensors) else result
