"""Checks of the sizes along `dim` that a call names, made before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.core.collectives.call import Call
from pcomm.core.errors import LayoutError

__all__ = ["gather_sizes", "scatter_sizes", "transfer_sizes"]


def gather_sizes(call: Call, rank: int, size: int) -> Sequence[int] | None:
    """Checked lengths of every rank's shard in an all-gather; None where all are equal. Local."""
    if call.sizes is None:
        return None
    x, dim, sizes = call.x, call.dim, call.sizes
    if len(sizes) != size or sizes[rank] != x.shape[dim] or min(sizes) < 0:
        raise LayoutError(
            f"all_gather: sizes {list(sizes)} along dim {dim}",
            found=f"rank {rank} of {size} has shape {tuple(x.shape)}",
            why="sizes names the length of each rank's shard, and this rank's must be its own; "
            "none is negative.",
            fix="Pass Layout.sizes of the layout by which the tensor is split.",
        )
    return None if len(set(sizes)) == 1 else sizes


def scatter_sizes(call: Call, size: int) -> Sequence[int] | None:
    """Checked lengths of the shards of a reduce-scatter; None where all are equal. Local."""
    x, dim, sizes = call.x, call.dim, call.sizes
    if sizes is None:
        if x.shape[dim] % size:
            raise LayoutError(
                f"reduce_scatter: shape {tuple(x.shape)} along dim {dim}",
                found=f"{x.shape[dim]} positions over {size} ranks",
                why="Without sizes every rank gets an equal shard.",
                fix="Pad the dimension to a multiple of the ranks, or pass sizes.",
            )
        return None
    if len(sizes) != size or sum(sizes) != x.shape[dim] or min(sizes) < 0:
        raise LayoutError(
            f"reduce_scatter: sizes {list(sizes)} along dim {dim}",
            found=f"shape {tuple(x.shape)}, {size} ranks",
            why="sizes names the shard of each rank, and together they are the dimension; none is "
            "negative.",
            fix="Pass Layout.sizes of the layout by which the result is split.",
        )
    return None if len(set(sizes)) == 1 else sizes


def transfer_sizes(call: Call, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Checked lengths of the parts sent to and received from each rank in an all-to-all. Local."""
    x, dim, send_sizes, receive_sizes = call.x, call.dim, call.sizes, call.receive_sizes
    if (send_sizes is None) != (receive_sizes is None):
        raise LayoutError(
            "all_to_all",
            found=f"send_sizes={send_sizes}, receive_sizes={receive_sizes}",
            why="Uneven parts have to be known on both sides.",
            fix="Pass both, or neither for equal parts.",
        )
    if send_sizes is None or receive_sizes is None:
        if x.shape[dim] % size:
            raise LayoutError(
                f"all_to_all: shape {tuple(x.shape)} along dim {dim}",
                found=f"{x.shape[dim]} positions for {size} ranks",
                why="Without sizes every rank gets an equal part.",
                fix="Pass send_sizes and receive_sizes.",
            )
        equal = [x.shape[dim] // size] * size
        return equal, equal
    is_one_each = len(send_sizes) == len(receive_sizes) == size
    if not is_one_each or sum(send_sizes) != x.shape[dim] or min(*send_sizes, *receive_sizes) < 0:
        raise LayoutError(
            f"all_to_all: send_sizes {list(send_sizes)}, receive_sizes {list(receive_sizes)}",
            found=f"shape {tuple(x.shape)} along dim {dim}, {size} ranks",
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
    return list(send_sizes), list(receive_sizes)
