"""Reduce-scatter of variable counts: every rank gets its rows of the sum over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls.collectives.inputs import (
    VECTOR_BYTES,
    check_input,
    dense,
    kind_of,
    way_of,
)
from pcomm.nvls.collectives.outputs import apart, check_result, deliver, outside, result_in
from pcomm.nvls.collectives.row_counts import RowCounts, check_counts, counts_on
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.reduce_scatter_v import reduce_scatter_v as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["reduce_scatter_v", "reduce_scatter_v_launch"]

_NAME = "reduce_scatter_v"


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
    check_input(_NAME, x, workspace.device)
    counts = check_counts(_NAME, x, counts, workspace)
    size, hidden = workspace.group.size, x.shape[1]
    limits = _limits(out, x, counts, size)
    row_bytes = hidden * x.itemsize
    num_bytes = limits.share_bytes(row_bytes, size)
    question = Question(
        _NAME, num_bytes, x.dtype, 0, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (hidden, limits, "on the device" if isinstance(counts, Tensor) else counts)
    choice = workspace.choose(question, strict=strict, detail=told)
    rows = limits.most_rows if isinstance(counts, Tensor) else counts[workspace.group.rank]
    check_result(_NAME, out, (rows, hidden), x, workspace)
    if choice.algorithm == "dist":
        x = outside(x, workspace)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        found = reference(x, counts, out=out, collectives=given, deterministic=ordered)
        return apart(found, x, out)
    result = result_in(out, (rows, hidden), x)
    if out is not None and result is not out:
        # Rows that are not written come back with the others.
        result.copy_(out.detach())
    if limits.total_rows and hidden:
        x = not_over(dense(x), result)
        on_device = counts_on(_NAME, counts, x.device)
        workspace.run(reduce_scatter_v_launch(workspace, choice, result, x, on_device, limits))
    return deliver(result, out)


def reduce_scatter_v_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, counts: Tensor, limits: RowCounts
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.reduce_scatter_v import reduce_scatter_v_kernel

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
        "KIND": kind_of(x.dtype),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "IN_PLACE": workspace.is_in_slot(x, turn),
        "BLOCK": 32 * choice.num_warps,
    }
    return Launch(
        reduce_scatter_v_kernel,
        choice.num_blocks,
        choice.num_warps,
        arguments,
        workspace.device,
        (x, out),
    )


def _limits(out: Tensor | None, x: Tensor, counts: Tensor | Sequence[int], size: int) -> RowCounts:
    if isinstance(counts, Tensor):
        most_rows = len(x) if out is None else len(out)
        return RowCounts(most_rows, min(len(x), size * most_rows))
    if sum(counts) != len(x):
        raise LayoutError(
            f"{_NAME}: counts {list(counts)}",
            found=f"{len(x)} rows",
            why="Numbers on the host say how many rows x has.",
            fix="Pass x[: sum(counts)], or the counts as a tensor on the device.",
        )
    return RowCounts(max(counts), sum(counts))
