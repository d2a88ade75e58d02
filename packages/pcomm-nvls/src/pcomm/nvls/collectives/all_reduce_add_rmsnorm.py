"""All-reduce, residual and norm in one kernel, where every rank has the whole residual."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

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
from pcomm.nvls.policy.shots import is_one_shot
from pcomm.nvls.references.all_reduce_add_rmsnorm import all_reduce_add_rmsnorm as reference
from pcomm.nvls.references.normed_rows import NormedRows
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["all_reduce_add_rmsnorm", "all_reduce_add_rmsnorm_launch"]

_NAME = "all_reduce_add_rmsnorm"


def all_reduce_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    workspace: Workspace,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> NormedRows:
    """The sum of `x` over all ranks and the residual, and its norm. Collective.

    It does not synchronise with the device. It is what a model without fused operations computes,
    rounded in the same places: `stream = all_reduce(x) + residual` and
    `rms_norm(stream, weight, eps)`. The sum over the ranks is rounded as that of `all_reduce`.

    Args:
        x: This rank's addends `[tokens, hidden]`, of any strides; bf16, fp16 and fp32 have kernels.
            Where it is what `workspace.empty` returned last, it is not copied, but written over.
        residual: Residual `[tokens, hidden]`, the same on all ranks.
        weight: Weight of the norm, `[hidden]`; for a norm that adds 1 to it, that sum.
        eps: Number that is added to the mean square.
        workspace: Workspace of the group.
        out: Tensor for the normed rows; None for a new one. It may be `x`.
        residual_out: Tensor for the new residual; None for a new one. It may be `residual`.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        Normed rows and new residual, both `[tokens, hidden]` in the dtype of `x`.

    Raises:
        UnsupportedError: Gradients are recorded, or `algo` or `strict` cannot be met.
        LayoutError: Shapes, dtypes or devices do not fit, or rows are too long for `algo`.
        ConfigError: A result, `residual` or `weight` lies in the workspace, or `x` in a part of it
            that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    check_rows(_NAME, x, residual, weight, 1, workspace)
    eps = float(eps)
    threads = row_threads(x.shape[1], x.itemsize)
    choice = choose_for_rows(_NAME, x, x.nbytes, threads, workspace, algo, strict, eps)
    shape = (len(x), x.shape[1])
    rows = new_or(_NAME, out, shape, x, workspace)
    stream = new_or(_NAME, residual_out, shape, x, workspace)
    check_inputs_outside(_NAME, residual, weight, workspace=workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        normed = reference(x, residual, weight, eps, collectives=given, deterministic=ordered)
        return NormedRows(
            deliver(normed.rows, out),
            deliver(normed.residual, residual_out),
        )
    if x.numel():
        assert threads is not None
        tensors = Stream.of(x, residual, weight, rows, stream, row_by_row=True)
        workspace.run(all_reduce_add_rmsnorm_launch(workspace, choice, threads, tensors, eps))
    return NormedRows(deliver(rows, out), deliver(stream, residual_out))


def all_reduce_add_rmsnorm_launch(
    workspace: Workspace, choice: Choice, threads: RowThreads, tensors: Stream, eps: float
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.all_reduce_add_rmsnorm import all_reduce_add_rmsnorm_kernel

    turn = workspace.turn()
    x, way = tensors.x, way_of(choice)
    architecture = workspace.capability.architecture
    one_shot = is_one_shot(x.nbytes, workspace.group.size, way, architecture)
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "residual": tensors.residual.data_ptr(),
        "weight": tensors.weight.data_ptr(),
        "new_residual": tensors.new_residual.data_ptr(),
        "out": tensors.out.data_ptr(),
        "num_rows": len(x),
        "row_vectors": x.shape[1] * x.itemsize // VECTOR_BYTES,
        "inverse_hidden": 1 / x.shape[1],
        "eps": eps,
        "slot": workspace.regions.slot(turn.slot),
        "KIND": kind_of(x.dtype),
        "WAY": way,
        "ENTRY": turn.needs_entry,
        "IN_PLACE": workspace.is_in_slot(x, turn),
        "TWO_SHOT": not one_shot,
        "BLOCK": threads.block,
    }
    kernel = all_reduce_add_rmsnorm_kernel
    return Launch(
        kernel,
        choice.num_blocks,
        threads.num_warps,
        arguments,
        workspace.device,
        tensors.all,
        threads.max_registers,
    )
