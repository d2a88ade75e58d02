"""Building a model whose weights are read next, without drawing the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDraws"]

_DRAWS = (
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    init.kaiming_uniform_,
    init.normal_,
    init.uniform_,
)


class WithoutDraws(TorchFunctionMode):
    """A context manager in which random initialisation leaves a tensor as it was allocated.

    For large models the draws take far longer than reading the weights. What is not filled
    afterwards holds any value.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The result of a call, or the tensor itself for one that draws."""
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
