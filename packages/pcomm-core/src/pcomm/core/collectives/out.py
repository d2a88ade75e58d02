"""The tensor that a caller names for a result: whether it fits, and what it may lie over."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.errors import LayoutError

__all__ = ["check_out", "deliver", "has_own_places", "is_dense", "not_over"]


def check_out(call: Call, length: int | None = None) -> Tensor | None:
    """Refuse an `out` that cannot take the result as it is. Local, before anything is sent.

    Torch would resize it, cast to its dtype, or receive the bytes as other numbers, depending on
    operation and size.

    Args:
        call: Call with an `out`, or without one, which is right. Its result has dtype and device
            of its input.
        length: Length of the result along `dim`; without it the result has the input's shape.

    Returns:
        `out` where a dense result with `dim` first may be written straight into it; None where
        that goes to a new tensor first.

    Raises:
        LayoutError: Shape, dtype or device differ, or elements of `out` share memory.
    """
    x, out = call.x, call.out
    if out is None:
        return None
    shape = list(x.shape)
    if length is not None:
        shape[call.dim] = length
    if list(out.shape) == shape and out.dtype is x.dtype and out.device == x.device:
        if is_dense(out):
            return out if call.dim == 0 else None
        # Strides in Python only where they are unusual: this runs in every call with an `out`.
        if out.is_contiguous() or has_own_places(out):
            return None
        found = f"strides {out.stride()}, so that several elements are one place in memory"
    else:
        found = f"a result of shape {tuple(shape)}, {x.dtype} on {x.device}"
    raise LayoutError(
        f"{call.operation}: out={out.dtype} of shape {tuple(out.shape)} on {out.device}",
        found=found,
        why="A result is written to out as it comes; out is never resized, and nothing is cast.",
        fix="Pass an out of that shape, dtype and device, or none.",
    )


def is_dense(out: Tensor) -> bool:
    """Whether an operation may write its bytes straight into `out`."""
    return (
        out.is_contiguous()
        # Autograd refuses to write to such a leaf, unless through `deliver`.
        and not out.requires_grad
        # The memory of these views holds other numbers than they do.
        and not out.is_conj()
        and not out.is_neg()
    )


def not_over(x: Tensor, out: Tensor, place: int | None = None) -> Tensor:
    """`x`, or a copy of it where writing to `out` would change what is still to be read. Local.

    Args:
        x: Tensor that is read.
        out: Tensor that is written to.
        place: Distance in bytes from the start of `out` to that of `x` at which an operation works
            in place; None if it never does.
    """
    distance = x.data_ptr() - out.data_ptr()
    if distance == place:
        return x
    ends_before = _extent(out) <= distance if distance >= 0 else _extent(x) <= -distance
    return x if ends_before else x.clone()


def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """`result` in dense memory, or in `out`."""
    if out is None:
        return result.contiguous()
    # Results carry no gradient. Autograd still sees that `out` has changed.
    out.detach().copy_(result.detach())
    return out


def has_own_places(out: Tensor) -> bool:
    """Whether each step along a dimension is longer than all that lies within it."""
    within = 0
    for stride, n in sorted(zip(out.stride(), out.shape, strict=True)):
        if n > 1:
            if stride <= within:
                return not out.numel()
            within += (n - 1) * stride
    return True


def _extent(x: Tensor) -> int:
    """Bytes from the first of `x` to behind its last."""
    # Most are dense, and then no stride has to be read.
    if x.is_contiguous():
        return x.nbytes
    if not x.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize
