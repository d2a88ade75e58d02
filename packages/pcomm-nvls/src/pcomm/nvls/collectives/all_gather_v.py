"""All-gather of variable counts: every rank gets the rows of all ranks, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls.collectives.inputs import VECTOR_BYTES, check_input, dense, way_of
from pcomm.nvls.collectives.outputs import (
    apart,
    check_inputs_outside,
    check_result,
    deliver,
    result_in,
)
from pcomm.nvls.collectives.row_counts import RowCounts, check_counts, counts_on
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.all_gather_v import all_gather_v as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["all_gather_v", "all_gather_v_launch"]

_NAME = "all_gather_v"


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
    check_input(_NAME, x, workspace.device)
    counts = check_counts(_NAME, x, counts, workspace)
    size, hidden = workspace.group.size, x.shape[1]
    limits = _limits(out, x, counts, workspace)
    row_bytes = hidden * x.itemsize
    num_bytes = limits.share_bytes(row_bytes, size)
    question = Question(
        _NAME, num_bytes, x.dtype, 0, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (hidden, limits, "on the device" if isinstance(counts, Tensor) else counts)
    choice = workspace.choose(question, strict=strict, detail=told)
    rows = len(out) if isinstance(counts, Tensor) and out is not None else limits.total_rows
    check_result(_NAME, out, (rows, hidden), x, workspace)
    check_inputs_outside(_NAME, x, workspace=workspace)
    if choice.algorithm == "dist":
        found = reference(x, counts, out=out, collectives=workspace.group.collectives)
        return apart(found, x, out)
    result = result_in(out, (rows, hidden), x)
    if out is not None and result is not out:
        # Rows that are not written come back with the others.
        result.copy_(out.detach())
    if limits.total_rows and hidden:
        x = not_over(dense(x), result)
        on_device = counts_on(_NAME, counts, x.device)
        workspace.run(all_gather_v_launch(workspace, choice, result, x, on_device, limits))
    return deliver(result, out)


def all_gather_v_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, counts: Tensor, limits: RowCounts
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.all_gather_v import all_gather_v_kernel

    turn = workspace.turn()
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "counts": counts,
        "most_rows": limits.most_rows,
        "total_rows": limits.total_rows,
        "row_vectors": x.shape[1] * x.itemsize // VECTOR_BYTES,
        "slot": workspace.regions.slot(turn.slot),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "COPY_OUT": True,
        "BLOCK": 32 * choice.num_warps,
    }
    return Launch(
        all_gather_v_kernel,
        choice.num_blocks,
        choice.num_warps,
        arguments,
        workspace.device,
        (x, out),
    )


def _limits(
    out: Tensor | None, x: Tensor, counts: Tensor | Sequence[int], workspace: Workspace
) -> RowCounts:
    size, rank = workspace.group.size, workspace.group.rank
    if isinstance(counts, Tensor):
        rows = size * len(x)
        return RowCounts(len(x), rows if out is None else min(rows, len(out)))
    if counts[rank] != len(x):
        raise LayoutError(
            f"{_NAME}: counts {list(counts)}",
            found=f"{len(x)} rows on the rank at place {rank}",
            why="Numbers on the host say how many rows x has.",
            fix="Pass x[: counts[rank]], or the counts as a tensor on the device.",
        )
    return RowCounts(max(counts), sum(counts))
