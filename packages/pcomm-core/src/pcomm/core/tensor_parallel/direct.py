"""A module whose call costs hardly more than the function behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_internals

__all__ = ["DirectModule"]


class DirectModule(nn.Module):
    """A module that goes straight to `run`, chosen once at construction, unless it has hooks.

    `nn.Module.__call__` and its parameter look-up cost about as much as a small matrix product
    does (rows in `docs/benchmarks`). A subclass sets `run` in its constructor to the method that
    fits its group; hooks, where there are any, are called as by every module.
    """

    run: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """What the module computes."""
        return self.run(x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or module_internals._has_any_global_hook()
            or kwargs
        ):
            return super().__call__(*args, **kwargs)
        return self.run(*args)
