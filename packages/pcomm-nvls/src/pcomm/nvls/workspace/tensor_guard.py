"""One call that says whether tensors are like those of before, where torch has such a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["guard_of"]


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """A function that is true of tensors like these, which are looked at now. Local.

    Like them are tensors of the same shape, strides, dtype, device and meaning of their bytes
    (conjugated, negated), which record no gradients. It may be false of such tensors, too: in
    inference mode if it was made outside, and where one is passed twice.

    It is what compiled graphs of torch check their inputs by, and takes as long as two or three
    questions to a tensor. That class is not documented: without it nothing is found to be alike.
    """
    if any(tensor.requires_grad for tensor in tensors):
        # Whether it is asked for gradients in the mode of then or of now depends on the version.
        return _never
    try:
        guards: Any = torch._C._dynamo.guards
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = made.check
        return check if check(*tensors) is True else _never
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return _never


def _never(*tensors: Tensor) -> bool:
    return False
