"""Autograd functions that are called as such only where a gradient is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["apply"]


class _NotRecorded:
    """The context of a forward without a backward: it keeps nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Nothing."""


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply(*inputs)`; where no gradient is recorded its forward alone, which costs less.

    Args:
        function: Class whose forward reads nothing from its context.
        inputs: Tensors and other arguments of its forward.
    """
    tensors = (x for x in inputs if isinstance(x, Tensor))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return function.apply(*inputs)
    return function.forward(_NotRecorded(), *inputs)
