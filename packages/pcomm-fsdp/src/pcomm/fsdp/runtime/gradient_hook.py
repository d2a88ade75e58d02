"""The hook that autograd calls when an unsharded parameter has a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pcomm.fsdp.guards import running_model_errors

__all__ = ["Takes", "gradient_hook"]


class Takes(Protocol):
    """Collects the gradients of its parameters."""

    def take(self, index: int) -> None:
        """The gradient of parameter `index` is there."""
        ...


def gradient_hook(owner: Takes, index: int) -> Callable[[Tensor], None]:
    """A hook for the unsharded parameter `index` of `owner`, which it does not keep alive. Local.

    Autograd's own C++ holds the hook, where the garbage collector sees nothing: with a strong
    reference the owner would never go, nor its groups and their threads.
    """
    find = weakref.ref(owner)

    def take(whole: Tensor) -> None:
        found = find()
        if found is None:
            whole.grad = None
            raise running_model_errors.gone()
        found.take(index)

    return take
