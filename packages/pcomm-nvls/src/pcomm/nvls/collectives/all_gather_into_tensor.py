"""All-gather: every rank gets the shards of all ranks, in rank order along a dimension."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls.collectives.inputs import (
    VECTOR_BYTES,
    check_input,
    dense,
    kernel_dim,
    way_of,
)
from pcomm.nvls.collectives.lamport_launches import lamport_all_gather_launch
from pcomm.nvls.collectives.outputs import (
    apart,
    check_inputs_outside,
    check_result,
    deliver,
    result_in,
)
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.all_gather_into_tensor import all_gather_into_tensor as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.repeats import Call, again
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["all_gather_into_tensor", "all_gather_launch", "all_gather_question"]

_NAME = "all_gather_into_tensor"


def all_gather_into_tensor(
    x: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    dim: int = 0,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
    copy: bool = True,
) -> Tensor:
    """The shards of all ranks, in rank order along `dim`. Collective; no synchronisation.

    Args:
        x: This rank's shard, of any dtype and strides; the same shape on all ranks.
        out: Tensor for the result, of any strides; None for a new one. It may lie over `x`.
        workspace: Workspace of the group.
        dim: Dimension along which the shards lie: 0, or the last one. Both are written in place;
            another one goes through torch.distributed.
        algo: "lamport", "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.
        copy: False may return a view of the slot, without `out` and for `dim` 0. It has to be
            read by what is launched before the next operation of the workspace;
            `Workspace.check_view` tells when that was missed.

    Returns:
        `[..., n * size, ...]`, dtype and device of `x`: bit for bit what the ranks passed. But
        "lamport" may return 0.0 for -0.0 of bf16, fp16, fp32, float8_e4m3fn and float8_e5m2.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        LayoutError: `out` does not fit, or `x` is on another device.
        ConfigError: `out` or `x` lies in the workspace.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    key = (_NAME, x.shape, x.dtype, dim, algo)
    done = again(workspace, key, x, out) if copy else None
    if done is not None:
        return done
    check_input(_NAME, x, workspace.device)
    shape = _result_shape(x, dim, workspace.group.size)
    question = all_gather_question(x, dim, workspace, algo)
    along = question.dim
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_NAME, out, shape, x, workspace)
    check_inputs_outside(_NAME, x, workspace=workspace)
    if choice.algorithm == "dist":
        found = reference(x, out=out, collectives=workspace.group.collectives, dim=dim)
        return apart(found, x, out)
    in_slot = not copy and out is None and along == 0 and choice.algorithm != "lamport"
    if in_slot and x.numel():
        x = dense(x)
        workspace.run(all_gather_launch(workspace, choice, None, x, along))
        return workspace.result_in_slot(shape, x.dtype)
    result = result_in(out, shape, x)
    if x.numel():
        # A launch has the address alone: a copy has to live until it runs. A block writes its own
        # shard back where it has read it, so that may be the same memory.
        place = workspace.group.rank * x.nbytes if along == 0 else None
        x = not_over(dense(x), result, place)
        launch = all_gather_launch(workspace, choice, result, x, along)
        workspace.run(launch, Call(key, x, result, place))
    return deliver(result, out)


def all_gather_question(
    x: Tensor, dim: int, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> Question:
    """What the algorithm of a call is chosen by. Local."""
    along = kernel_dim(x, dim)
    row_bytes = x.shape[-1] * x.itemsize if along == -1 else None
    return Question(_NAME, x.nbytes, x.dtype, along, row_bytes, workspace.deterministic, algo)


def all_gather_launch(
    workspace: Workspace, choice: Choice, out: Tensor | None, x: Tensor, dim: int
) -> Launch:
    """The launch that a choice asks for; without `out` the result stays in the slot. A turn."""
    if choice.algorithm == "lamport":
        assert out is not None
        return lamport_all_gather_launch(workspace, choice, out, x, dim)
    from pcomm.nvls.kernels.all_gather import all_gather_kernel

    turn = workspace.turn()
    num_vectors = x.nbytes // VECTOR_BYTES
    row_vectors = x.shape[-1] * x.itemsize // VECTOR_BYTES if dim == -1 else num_vectors
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "out": 0 if out is None else out.data_ptr(),
        "num_vectors": num_vectors,
        "row_vectors": row_vectors,
        "slot": workspace.regions.slot(turn.slot),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "COPY_OUT": out is not None,
        "BLOCK": 32 * choice.num_warps,
    }
    return Launch(
        all_gather_kernel,
        choice.num_blocks,
        choice.num_warps,
        arguments,
        workspace.device,
        (x,) if out is None else (x, out),
    )


def _result_shape(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    try:
        shape[dim] *= size
    except IndexError:
        raise LayoutError(
            f"{_NAME}: dim={dim}",
            found=f"a tensor of shape {tuple(x.shape)}",
            why="Shards lie along a dimension of the tensor.",
            fix="Name a dimension that it has; give a single number one by x.view(1).",
        ) from None
    return tuple(shape)
