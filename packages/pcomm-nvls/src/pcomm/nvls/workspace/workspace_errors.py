"""The errors of a workspace: what was asked, what was found, why that cannot be, how to go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core.errors import ClosedError, ConfigError, PeerTimeoutError

__all__ = [
    "is_closed",
    "is_handed_out",
    "not_handed_out",
    "of_another_process",
    "rank_is_missing",
    "too_large",
    "view_is_old",
]


def is_closed(operation: str) -> ClosedError:
    """The error of an operation after `close`."""
    return ClosedError(
        operation,
        found="the workspace is closed",
        why="Its memory has been given back, on this rank at least.",
        fix="Use it within its `with` block, and before its groups close.",
    )


def of_another_process(operation: str, opened_in: int) -> ClosedError:
    """The error of an operation in a process that was forked from that of the rank."""
    return ClosedError(
        operation,
        found=f"a workspace that process {opened_in} has opened",
        why="Two processes would take part as one rank, and count its operations apart.",
        fix="Call it in the process of the rank, or start processes by spawn.",
    )


def is_handed_out(shape: Sequence[int], dtype: torch.dtype) -> ConfigError:
    """The error of `empty` while what it returned for the next operation is still held."""
    return ConfigError(
        f"Workspace.empty: shape {tuple(shape)} of {dtype}",
        found="the memory for the next operation, which was handed out before and is still held",
        why="Both tensors would lie in one place.",
        fix="Call the operation first, or use the tensor again that was returned.",
    )


def not_handed_out(offset: int) -> ConfigError:
    """The error of an input in the workspace that `empty` has not returned for this operation."""
    return ConfigError(
        "an operation on a view of the workspace",
        found=f"a tensor at byte {offset} of it, which was not handed out for this operation",
        why="Other ranks write into that memory, and it has been written since.",
        fix="Use what workspace.empty() returned last, in the same CUDA graph as the operation, "
        "or a copy of the view.",
    )


def too_large(
    shape: Sequence[int], dtype: torch.dtype, num_bytes: int, max_bytes: int
) -> ConfigError:
    """The error of a tensor that fits into no slot."""
    return ConfigError(
        f"Workspace.empty: shape {tuple(shape)} of {dtype}",
        found=f"{num_bytes} bytes, and max_bytes={max_bytes}",
        why="A slot has max_bytes.",
        fix="Open a larger workspace, or allocate the tensor with torch.empty.",
    )


def rank_is_missing(rank: int, timeout_s: float) -> PeerTimeoutError:
    """The error after an operation that did not get the signal of a rank in time."""
    return PeerTimeoutError(
        "an operation of pcomm.nvls",
        found=f"rank {rank} did not signal within {timeout_s:g} s",
        why="Every rank of the group makes the same operations in the same order.",
        fix=f"Look for an earlier error on rank {rank}, or for another call than this one there: "
        "open the workspace with debug=True. This one cannot be used any more: close it and open "
        "a new one.",
    )


def view_is_old(generation: int, newest: int) -> ConfigError:
    """The error of a view whose slot may have been written since."""
    return ConfigError(
        f"a view of operation {generation} of the workspace",
        found=f"operation {newest} has begun",
        why="Other ranks may write into that slot from then on.",
        fix="Launch what reads the view before the next operation, or ask for a copy.",
    )
