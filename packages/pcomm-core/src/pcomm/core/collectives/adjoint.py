"""One autograd function for all communication: a linear operation and its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_adjoint"]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.adjoint = adjoint
        result = run(x)
        # Autograd wants a new tensor object even where the operation has nothing to do.
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradients[0]), None, None


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
    result: Tensor = _Linear.apply(x, run, adjoint)  # type: ignore[no-untyped-call]
    return result
