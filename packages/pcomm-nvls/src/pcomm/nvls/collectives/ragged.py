"""All-gather and reduce-scatter of rows that are counted for each rank.

Counts are numbers on the host, or on the device without a wait for them. A kernel gets them on the
device in either case, with two numbers that all ranks have in common: the most rows of one rank,
and of all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pcomm.core.collectives.checks import not_over
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.nvls import references
from pcomm.nvls.collectives.call import (
    VECTOR_BYTES,
    apart,
    barrier_launch,
    check_input,
    check_inputs_outside,
    check_result,
    deliver,
    dense,
    kind_of,
    outside,
    result_in,
)
from pcomm.nvls.policy.choose import Choice, CollectiveRequest
from pcomm.nvls.policy.table import Algorithm
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "RowCounts",
    "all_gather_v",
    "all_gather_v_launch",
    "reduce_scatter_v",
    "reduce_scatter_v_launch",
]

_GATHER, _SCATTER = "all_gather_v", "reduce_scatter_v"


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


def all_gather_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> Tensor:
    """The rows of all ranks, in rank order and without gaps. Collective; no synchronisation.

    With counts on the device the host need not know them, and neither grid nor shapes depend on
    them, so that a CUDA graph may contain the call. Tensors then have a fixed number of rows, of
    which the first ones count: those of `out` behind the last one that was gathered are left as
    they were. Counts are cut off at the rows of `x`, and rows that `out` has no place for are left
    out, without an error.

    Args:
        x: This rank's rows `[rows, hidden]`, of any dtype and strides. With counts on the device
            the same shape on all ranks; otherwise `counts[rank]` rows.
        counts: Number of rows of each rank, the same on all ranks: an int32 tensor `[size]` on the
            device, or numbers.
        out: Tensor for the result, of any strides; None for a new one. With counts on the device it
            may have any number of rows, the same on all ranks; a new one has place for all.
        workspace: Workspace of the group.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        `[sum(counts), hidden]`, or `out` as it is described above; bit for bit what ranks passed.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        LayoutError: `counts`, `x` and `out` do not fit together.
        ConfigError: `out` or `x` lies in the workspace, or numbers on the host go into a CUDA
            graph.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    check_input(_GATHER, x, workspace.device)
    counts = _checked_counts(_GATHER, x, counts, workspace)
    size, hidden = workspace.group.size, x.shape[1]
    limits = _gathered_limits(out, x, counts, workspace)
    row_bytes = hidden * x.itemsize
    num_bytes = limits.share_bytes(row_bytes, size)
    question = CollectiveRequest(
        _GATHER, num_bytes, x.dtype, 0, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (hidden, limits, "on the device" if isinstance(counts, Tensor) else counts)
    choice = workspace.choose(question, strict=strict, detail=told)
    rows = len(out) if isinstance(counts, Tensor) and out is not None else limits.total_rows
    check_result(_GATHER, out, (rows, hidden), x, workspace)
    check_inputs_outside(_GATHER, x, workspace=workspace)
    if choice.algorithm == "dist":
        found = references.all_gather_v(x, counts, out=out, collectives=workspace.group.collectives)
        return apart(found, x, out)
    result = result_in(out, (rows, hidden), x)
    if out is not None and result is not out:
        # Rows that are not written come back with the others.
        result.copy_(out.detach())
    if limits.total_rows and hidden:
        x = not_over(dense(x), result)
        on_device = _counts_on(_GATHER, counts, x.device)
        workspace.run(all_gather_v_launch(workspace, choice, result, x, on_device, limits))
    return deliver(result, out)


def all_gather_v_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, counts: Tensor, limits: RowCounts
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.ragged import all_gather_v_kernel

    lease = workspace.turn()
    arguments = _rows(out, x, counts, limits)
    return barrier_launch(all_gather_v_kernel, workspace, choice, lease, arguments, (x, out))


def _gathered_limits(
    out: Tensor | None, x: Tensor, counts: Tensor | Sequence[int], workspace: Workspace
) -> RowCounts:
    size, rank = workspace.group.size, workspace.group.rank
    if isinstance(counts, Tensor):
        rows = size * len(x)
        return RowCounts(len(x), rows if out is None else min(rows, len(out)))
    if counts[rank] != len(x):
        raise LayoutError(
            f"{_GATHER}: counts {list(counts)}",
            found=f"{len(x)} rows on the rank at place {rank}",
            why="Numbers on the host say how many rows x has.",
            fix="Pass x[: counts[rank]], or the counts as a tensor on the device.",
        )
    return RowCounts(max(counts), sum(counts))


def reduce_scatter_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> Tensor:
    """This rank's rows of the sum of `x` over all ranks. Collective; no synchronisation.

    The inverse of `all_gather_v`: rank r gets `counts[r]` rows, behind those of the ranks before.
    With counts on the device the host need not know them, and neither grid nor shapes depend on
    them, so that a CUDA graph may contain the call. Rows of `out` behind this rank's last one are
    left as they were. Counts are cut off at the rows of `out`, and at the end of `x`, without an
    error. The sum is rounded as that of `reduce_scatter_tensor`.

    Args:
        x: This rank's addends `[rows, hidden]`, of any strides and the same shape on all ranks;
            with numbers, `sum(counts)` rows. Where it is what `workspace.empty` returned last, it
            is not copied.
        counts: Number of rows of each rank, the same on all ranks: an int32 tensor `[size]` on the
            device, or numbers.
        out: Tensor for the result, of any strides; None for a new one. With counts on the device it
            has the same number of rows on all ranks; a new one has those of `x`.
        workspace: Workspace of the group.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        `[counts[rank], hidden]`, or `out` as it is described above.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        LayoutError: `counts`, `x` and `out` do not fit together.
        ConfigError: `out` lies in the workspace, `x` in a part of it that is in use, or numbers on
            the host go into a CUDA graph.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    check_input(_SCATTER, x, workspace.device)
    counts = _checked_counts(_SCATTER, x, counts, workspace)
    size, hidden = workspace.group.size, x.shape[1]
    limits = _scattered_limits(out, x, counts, size)
    row_bytes = hidden * x.itemsize
    num_bytes = limits.share_bytes(row_bytes, size)
    question = CollectiveRequest(
        _SCATTER, num_bytes, x.dtype, 0, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (hidden, limits, "on the device" if isinstance(counts, Tensor) else counts)
    choice = workspace.choose(question, strict=strict, detail=told)
    rows = limits.most_rows if isinstance(counts, Tensor) else counts[workspace.group.rank]
    check_result(_SCATTER, out, (rows, hidden), x, workspace)
    if choice.algorithm == "dist":
        x = outside(x, workspace)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        found = references.reduce_scatter_v(
            x, counts, out=out, collectives=given, deterministic=ordered
        )
        return apart(found, x, out)
    result = result_in(out, (rows, hidden), x)
    if out is not None and result is not out:
        # Rows that are not written come back with the others.
        result.copy_(out.detach())
    if limits.total_rows and hidden:
        x = not_over(dense(x), result)
        on_device = _counts_on(_SCATTER, counts, x.device)
        workspace.run(reduce_scatter_v_launch(workspace, choice, result, x, on_device, limits))
    return deliver(result, out)


def reduce_scatter_v_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, counts: Tensor, limits: RowCounts
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.ragged import reduce_scatter_v_kernel

    lease = workspace.turn()
    arguments = {
        **_rows(out, x, counts, limits),
        "KIND": kind_of(x.dtype),
        "IN_PLACE": workspace.is_in_slot(x, lease),
    }
    return barrier_launch(reduce_scatter_v_kernel, workspace, choice, lease, arguments, (x, out))


def _scattered_limits(
    out: Tensor | None, x: Tensor, counts: Tensor | Sequence[int], size: int
) -> RowCounts:
    if isinstance(counts, Tensor):
        most_rows = len(x) if out is None else len(out)
        return RowCounts(most_rows, min(len(x), size * most_rows))
    if sum(counts) != len(x):
        raise LayoutError(
            f"{_SCATTER}: counts {list(counts)}",
            found=f"{len(x)} rows",
            why="Numbers on the host say how many rows x has.",
            fix="Pass x[: sum(counts)], or the counts as a tensor on the device.",
        )
    return RowCounts(max(counts), sum(counts))


def _checked_counts(
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


def _counts_on(operation: str, counts: Tensor | Sequence[int], device: torch.device) -> Tensor:
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


def _rows(out: Tensor, x: Tensor, counts: Tensor, limits: RowCounts) -> dict[str, Any]:
    return {
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "counts": counts,
        "most_rows": limits.most_rows,
        "total_rows": limits.total_rows,
        "row_vectors": x.shape[1] * x.itemsize // VECTOR_BYTES,
    }
