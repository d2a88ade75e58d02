"""Reduce-scatter, residual, norm and all-gather in one kernel, where tokens are divided."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import LayoutError
from pcomm.nvls.collectives.inputs import VECTOR_BYTES, kind_of, way_of
from pcomm.nvls.collectives.outputs import check_inputs_outside, deliver
from pcomm.nvls.collectives.rows import (
    RowThreads,
    Stream,
    check_rows,
    choose_for_rows,
    new_or,
    row_threads,
)
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.normed_rows import NormedRows
from pcomm.nvls.references.reduce_scatter_add_rmsnorm_all_gather import (
    reduce_scatter_add_rmsnorm_all_gather as reference,
)
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "reduce_scatter_add_rmsnorm_all_gather",
    "reduce_scatter_add_rmsnorm_all_gather_launch",
]

_NAME = "reduce_scatter_add_rmsnorm_all_gather"


def reduce_scatter_add_rmsnorm_all_gather(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    workspace: Workspace,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    fp8: Literal["rows"] | Tensor | None = None,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> NormedRows:
    """The normed rows of all ranks, of which each adds its share of the tokens. Collective.

    It does not synchronise with the device. It is what a model without fused operations computes,
    rounded in the same places: `stream = reduce_scatter(x) + residual` and
    `all_gather(rms_norm(stream, weight, eps))`. The sum over the ranks is rounded as that of
    `reduce_scatter_tensor`, and 8-bit floats are made of the rounded norm.

    Args:
        x: This rank's addends `[tokens, hidden]`, of any strides; bf16, fp16 and fp32 have kernels.
            The tokens are a multiple of the ranks. Where it is what `workspace.empty` returned
            last, it is not copied, but written over.
        residual: This rank's share of the residual, `[tokens / size, hidden]`.
        weight: Weight of the norm, `[hidden]`; for a norm that adds 1 to it, that sum.
        eps: Number that is added to the mean square.
        workspace: Workspace of the group.
        out: Tensor for the normed rows; None for a new one. It may be `x`.
        residual_out: Tensor for the new residual; None for a new one. It may be `residual`.
        fp8: None for rows in the dtype of `x`. For `torch.float8_e4m3fn`, which are gathered with
            half as many bytes: "rows" for a scale for each row, or one fp32 number `[1]` on the
            device, the scale of all rows. Then `x` has two bytes a number, and a row 16 numbers or
            a multiple.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        Normed rows `[tokens, hidden]`, this rank's share of the new residual in the dtype of `x`,
        and with "rows" the scales, fp32 `[tokens]`.

    Raises:
        UnsupportedError: Gradients are recorded, or `algo` or `strict` cannot be met.
        LayoutError: Shapes, dtypes or devices do not fit, or rows are too long for `algo`.
        ConfigError: A result, `residual` or `weight` lies in the workspace, or `x` in a part of it
            that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    size = workspace.group.size
    check_rows(_NAME, x, residual, weight, size, workspace)
    eps = float(eps)
    _check_fp8(x, fp8)
    threads = row_threads(x.shape[1], x.itemsize, halves=fp8 is not None)
    told = (eps, "one scale" if isinstance(fp8, Tensor) else fp8)
    choice = choose_for_rows(_NAME, x, x.nbytes // size, threads, workspace, algo, strict, told)
    like = x if fp8 is None else x.new_empty((), dtype=torch.float8_e4m3fn)
    rows = new_or(_NAME, out, (len(x), x.shape[1]), like, workspace)
    stream = new_or(_NAME, residual_out, (len(residual), x.shape[1]), x, workspace)
    check_inputs_outside(_NAME, residual, weight, workspace=workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        normed = reference(
            x,
            residual,
            weight,
            eps,
            collectives=workspace.group.collectives,
            fp8=fp8,
            deterministic=workspace.deterministic,
        )
        return NormedRows(
            deliver(normed.rows, out),
            deliver(normed.residual, residual_out),
            normed.scales,
        )
    scales = x.new_empty(len(x), dtype=torch.float32) if fp8 == "rows" else None
    if x.numel():
        assert threads is not None
        tensors = Stream.of(x, residual, weight, rows, stream, row_by_row=False)
        known = fp8 if isinstance(fp8, Tensor) else scales
        launch = reduce_scatter_add_rmsnorm_all_gather_launch(
            workspace, choice, threads, tensors, eps, known, is_given=scales is None
        )
        workspace.run(launch)
    return NormedRows(deliver(rows, out), deliver(stream, residual_out), scales)


def reduce_scatter_add_rmsnorm_all_gather_launch(
    workspace: Workspace,
    choice: Choice,
    threads: RowThreads,
    tensors: Stream,
    eps: float,
    scales: Tensor | None = None,
    *,
    is_given: bool = False,
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace.

    Args:
        workspace: Workspace of the group.
        choice: Algorithm and number of blocks.
        threads: Threads of a block.
        tensors: Tensors of the call; `out` may be of 8-bit floats.
        eps: Number that is added to the mean square.
        scales: fp32 scales of 8-bit floats; None without these.
        is_given: True where `scales` is the one scale of all rows.
    """
    from pcomm.nvls.kernels.reduce_scatter_add_rmsnorm_all_gather import (
        reduce_scatter_add_rmsnorm_all_gather_kernel,
    )

    turn = workspace.turn()
    x = tensors.x
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "residual": tensors.residual.data_ptr(),
        "weight": tensors.weight.data_ptr(),
        "new_residual": tensors.new_residual.data_ptr(),
        "out": tensors.out.data_ptr(),
        "scales": x.data_ptr() if scales is None else scales,
        "num_rows": len(tensors.residual),
        "row_vectors": x.shape[1] * x.itemsize // VECTOR_BYTES,
        "inverse_hidden": 1 / x.shape[1],
        "eps": eps,
        "slot": workspace.regions.slot(turn.slot),
        "KIND": kind_of(x.dtype),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "IN_PLACE": workspace.is_in_slot(x, turn),
        "COPY_OUT": True,
        "FP8": "no" if scales is None else "given" if is_given else "rows",
        "BLOCK": threads.block,
    }
    kernel = reduce_scatter_add_rmsnorm_all_gather_kernel
    return Launch(
        kernel,
        choice.num_blocks,
        threads.num_warps,
        arguments,
        workspace.device,
        tensors.all,
        threads.max_registers,
    )


def _check_fp8(x: Tensor, fp8: Literal["rows"] | Tensor | None) -> None:
    """Refuse 8-bit floats that cannot be made, and a scale that is none. Local."""
    if fp8 is None:
        return
    if isinstance(fp8, Tensor):
        is_known = fp8.dtype is torch.float32 and fp8.numel() == 1
        is_known &= fp8.device.type == x.device.type
        found = f"fp8 of shape {tuple(fp8.shape)}, {fp8.dtype} on {fp8.device}"
    else:
        is_known, found = fp8 == "rows", f"fp8={fp8!r}"
    if is_known and x.itemsize == 2 and not x.shape[1] % 16:
        return
    raise LayoutError(
        f"{_NAME}: {found}",
        found=f"x of shape {tuple(x.shape)}, {x.dtype} on {x.device}",
        why="Sixteen numbers of two bytes become 16 bytes, with a scale for each row, or one.",
        fix='Pass fp8="rows" or one fp32 number on the device of x, and hidden as a multiple of '
        "16; or fp8=None, and convert the result.",
    )
