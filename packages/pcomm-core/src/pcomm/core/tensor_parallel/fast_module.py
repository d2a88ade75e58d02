"""A module whose call costs hardly more than the function behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["FastModule"]


class FastModule(nn.Module):
    """A module of one input that goes straight to `forward`, unless something is hooked to it.

    `nn.Module.__call__` and its look-up of parameters cost about as much as a small matrix
    product (rows in `docs/benchmarks`). A subclass sets `run` in its constructor to the one of
    its functions that fits its group. Hooks and `compile` work as on every module.
    """

    # A function of the class and not a bound method: that would tie a knot between the module and
    # itself, and a deleted model would keep its memory until the garbage collector comes.
    run: Callable[[Any, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """What the module computes."""
        return self.run(self, x)

    def __call__(self, x: Tensor) -> Any:
        """`forward`, and the hooks where there are any."""
        # One look-up instead of five: each attribute of a module goes through its `__getattr__`.
        own = self.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "_compiled_call_impl" in own
            or _has_any_global_hook()
        ):
            return super().__call__(x)
        return self.forward(x)
