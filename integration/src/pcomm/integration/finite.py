"""Numbers that are not finite, and the error that they are."""

from __future__ import annotations

from torch import Tensor

from pcomm.core import PcommError

__all__ = ["NotFiniteError", "is_finite"]


class NotFiniteError(PcommError, ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite, so the run would train on nothing."""


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is a finite number. Local; waits for the tensor's device."""
    # A gradient of a sharded model is asked about this rank's part, which is meant here.
    tensor = tensor.as_subclass(Tensor)
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # A sum needs no memory, and is finite only where all its terms are; it may itself overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
