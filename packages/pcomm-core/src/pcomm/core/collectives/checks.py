"""What is refused before anything is sent: sizes, reductions, and the tensors given as `out=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from pcomm.core.collectives.protocol import Call, Reduction
from pcomm.core.errors import ConfigError, LayoutError, TopologyError, near_misses

__all__ = [
    "check_out",
    "check_reduction",
    "check_source",
    "deliver",
    "gather_sizes",
    "has_own_places",
    "is_dense",
    "not_over",
    "scatter_sizes",
    "transfer_sizes",
]


_REDUCTIONS = get_args(Reduction)


def check_reduction(op: str) -> None:
    """Refuse an unknown reduction. Local."""
    if op not in _REDUCTIONS:
        raise ConfigError(
            f"all_reduce: op={op!r}",
            found=f"a reduction other than {' and '.join(_REDUCTIONS)}",
            why="Only these are the same on all backends.",
            fix=near_misses(str(op), _REDUCTIONS),
        )


def check_source(call: Call, size: int) -> None:
    """Refuse a broadcast from a place outside the group. Local."""
    if not 0 <= call.source < size:
        raise TopologyError(
            f"broadcast: source={call.source}",
            found=f"a group of {size} ranks",
            why="The source is a place in the group, and not a rank of the whole job.",
            fix=f"Name a place from 0 to {size - 1}.",
        )


def gather_sizes(call: Call, rank: int, size: int) -> tuple[int, Sequence[int] | None]:
    """Checked lengths in an all-gather: of the result, and of each shard. Local.

    The second is None where all shards are equal.
    """
    length, sizes = call.length, call.sizes
    if sizes is None:
        return length * size, None
    if len(sizes) != size or sizes[rank] != length or min(sizes) < 0:
        raise LayoutError(
            f"all_gather: sizes {list(sizes)} along dim {call.dim}",
            found=f"rank {rank} of {size} has shape {tuple(call.x.shape)}",
            why="sizes names the length of each rank's shard, and this rank's must be its own; "
            "none is negative.",
            fix="Pass Layout.sizes of the layout by which the tensor is split.",
        )
    return sum(sizes), None if len(set(sizes)) == 1 else sizes


def scatter_sizes(call: Call, rank: int, size: int) -> tuple[int, Sequence[int] | None]:
    """Checked lengths in a reduce-scatter: of this rank's shard, and of each one. Local.

    The second is None where all shards are equal.
    """
    length, sizes = call.length, call.sizes
    if sizes is None:
        if length % size:
            raise LayoutError(
                f"reduce_scatter: shape {tuple(call.x.shape)} along dim {call.dim}",
                found=f"{length} positions over {size} ranks",
                why="Without sizes every rank gets an equal shard.",
                fix="Pad the dimension to a multiple of the ranks, or pass sizes.",
            )
        return length // size, None
    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        raise LayoutError(
            f"reduce_scatter: sizes {list(sizes)} along dim {call.dim}",
            found=f"shape {tuple(call.x.shape)}, {size} ranks",
            why="sizes names the shard of each rank, and together they are the dimension; none is "
            "negative.",
            fix="Pass Layout.sizes of the layout by which the result is split.",
        )
    return sizes[rank], None if len(set(sizes)) == 1 else sizes


def transfer_sizes(
    call: Call, rank: int, size: int
) -> tuple[int, list[int] | None, list[int] | None]:
    """Checked lengths in an all-to-all: of the result, of each part sent and received. Local.

    The last two are None where all parts are equal.
    """
    length, send_sizes, receive_sizes = call.length, call.sizes, call.receive_sizes
    if (send_sizes is None) != (receive_sizes is None):
        raise LayoutError(
            "all_to_all",
            found=f"send_sizes={send_sizes}, receive_sizes={receive_sizes}",
            why="Uneven parts have to be known on both sides.",
            fix="Pass both, or neither for equal parts.",
        )
    if send_sizes is None or receive_sizes is None:
        if length % size:
            raise LayoutError(
                f"all_to_all: shape {tuple(call.x.shape)} along dim {call.dim}",
                found=f"{length} positions for {size} ranks",
                why="Without sizes every rank gets an equal part.",
                fix="Pass send_sizes and receive_sizes.",
            )
        return length, None, None
    is_one_each = len(send_sizes) == len(receive_sizes) == size
    if not is_one_each or sum(send_sizes) != length or min(*send_sizes, *receive_sizes) < 0:
        raise LayoutError(
            f"all_to_all: send_sizes {list(send_sizes)}, receive_sizes {list(receive_sizes)}",
            found=f"shape {tuple(call.x.shape)} along dim {call.dim}, {size} ranks",
            why="There is one part per rank, none is negative, and the parts sent are the whole "
            "dimension.",
            fix="Give one size per rank; the sent ones add up to the length of the dimension.",
        )
    if send_sizes[rank] != receive_sizes[rank]:
        raise LayoutError(
            f"all_to_all: send_sizes {list(send_sizes)}, receive_sizes {list(receive_sizes)}",
            found=f"rank {rank} sends itself {send_sizes[rank]} and gets {receive_sizes[rank]}",
            why="What a rank sends to itself is what it gets from itself.",
            fix="Check that receive_sizes are those that the others send to this rank.",
        )
    return sum(receive_sizes), list(send_sizes), list(receive_sizes)


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
