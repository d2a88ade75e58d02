"""Floats of 8 bits as bytes: what moves them need not know them, and gloo does not."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["as_bytes", "as_dtype"]

T = TypeVar("T", Tensor, Tensor | None)


def as_bytes(x: T) -> T:
    """The same memory as uint8 where it holds floats of 8 bits; others, and None, as they are."""
    if x is not None and x.is_floating_point() and x.itemsize == 1:
        return x.view(torch.uint8)
    return x


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory in the dtype that it had before `as_bytes`."""
    # Torch refuses to view what is negated or conjugated, also in the dtype that it has.
    return x if x.dtype == dtype else x.view(dtype)
