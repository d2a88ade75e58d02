"""How many rows each rank has: numbers on the host, or on the device without a wait for them.

A kernel gets them on the device in either case, with two numbers that all ranks have in common: the
most rows of one rank, and of all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["RowCounts", "check_counts", "counts_on"]


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The limits of the rows of a call, the same on all ranks.

    Args:
        most_rows: Most rows of one rank.
        total_rows: Most rows of all ranks together.
    """

    most_rows: int
    total_rows: int

    def share_bytes(self, row_bytes: int, size: int) -> int:
        """An equal share of all rows, in bytes and rounded up to rows."""
        return -(-self.total_rows // size) * row_bytes


def check_counts(
    operation: str, x: Tensor, counts: Tensor | Sequence[int], workspace: Workspace
) -> Tensor | list[int]:
    """The counts, on the host in Python's own integers; others and rows of no matrix are refused.

    Local. Kernels and comparisons between ranks take no integers of NumPy.

    Raises:
        LayoutError: `x` is no matrix; there is not one integer for each rank; one is negative;
            or counts on the device are not int32, dense, and where the workspace is.
    """
    size = workspace.group.size
    if x.dim() != 2:
        raise LayoutError(
            f"{operation}: a tensor of shape {tuple(x.shape)}",
            found=f"{x.dim()} dimensions",
            why="Rows are counted along the first dimension of [tokens, hidden].",
            fix="Pass x.flatten(1), or x.view(-1, 1) for single numbers.",
        )
    if isinstance(counts, Tensor):
        is_dense = counts.is_contiguous() and tuple(counts.shape) == (size,)
        if is_dense and counts.dtype is torch.int32 and counts.device.type == x.device.type:
            return counts
        found = f"{counts.dtype} of shape {tuple(counts.shape)} on {counts.device}"
    else:
        whole = [int(n) for n in counts if hasattr(n, "__index__")]
        if len(whole) == len(counts) == size and min(whole) >= 0:
            return whole
        found = f"{list(counts)}, {size} ranks"
    raise LayoutError(
        f"{operation}: counts",
        found=found,
        why="There is one number of rows for each rank, none negative; kernels read int32.",
        fix=f"Pass a list of {size} numbers, or a dense int32 tensor of them on {x.device}.",
    )


def counts_on(operation: str, counts: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The counts as int32 on the device. Local.

    Raises:
        ConfigError: They are on the host, and the operation goes into a CUDA graph.
    """
    if isinstance(counts, Tensor):
        return counts
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"{operation}: counts {list(counts)} in a CUDA graph",
            found="numbers on the host",
            why="A replay would use these numbers for ever.",
            fix="Pass an int32 tensor on the device, and write to it before each replay.",
        )
    return torch.tensor(counts, dtype=torch.int32, device=device)
