"""Reduce-scatter: every rank gets its segment, along a dimension, of the sum over all ranks."""

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
    kind_of,
    way_of,
)
from pcomm.nvls.collectives.lamport_launches import lamport_reduce_scatter_launch
from pcomm.nvls.collectives.outputs import apart, check_result, deliver, outside, result_in
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.reduce_scatter_tensor import reduce_scatter_tensor as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.repeats import Call, again
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["reduce_scatter_launch", "reduce_scatter_question", "reduce_scatter_tensor"]

_NAME = "reduce_scatter_tensor"


def reduce_scatter_tensor(
    x: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    dim: int = 0,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> Tensor:
    """This rank's segment along `dim` of the sum of `x` over all ranks. Collective.

    It does not synchronise with the device. bf16, fp16 and fp32 are added in fp32 and rounded once:
    in rank order ("p2p", "lamport"), or in the order of the switch ("multimem"). Other types go
    through torch.distributed, whose order is the backend's unless the workspace is deterministic.

    Args:
        x: This rank's tensor, of any strides and the same shape on all ranks. Where it is what
            `workspace.empty` returned last, it is not copied.
        out: Tensor for the result, of any strides; None for a new one. It may lie over `x`.
        workspace: Workspace of the group.
        dim: Dimension that is divided among the ranks: 0, or the last one. Another one goes through
            torch.distributed.
        algo: "lamport", "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        `[..., n / size, ...]`, dtype and device of `x`.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        LayoutError: `x` cannot be divided, `out` does not fit, or `x` is on another device.
        ConfigError: `out` lies in the workspace, or `x` in a part of it that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    key = (_NAME, x.shape, x.dtype, dim, algo)
    done = again(workspace, key, x, out)
    if done is not None:
        return done
    check_input(_NAME, x, workspace.device)
    shape = _result_shape(x, dim, workspace.group.size)
    question = reduce_scatter_question(x, dim, workspace, algo)
    along = question.dim
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_NAME, out, shape, x, workspace)
    if choice.algorithm == "dist":
        x = outside(x, workspace)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        found = reference(x, out=out, collectives=given, dim=dim, deterministic=ordered)
        return apart(found, x, out)
    result = result_in(out, shape, x)
    if x.numel():
        # A block sums a segment where it has read it, so that may be the same memory.
        place = -workspace.group.rank * result.nbytes if along == 0 else None
        x = not_over(dense(x), result, place)
        launch = reduce_scatter_launch(workspace, choice, result, x, along)
        workspace.run(launch, Call(key, x, result, place))
    return deliver(result, out)


def reduce_scatter_question(
    x: Tensor, dim: int, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> Question:
    """What the algorithm of a call is chosen by. Local."""
    along, size = kernel_dim(x, dim), workspace.group.size
    row_bytes = x.shape[-1] // size * x.itemsize if along == -1 else None
    ordered = workspace.deterministic
    return Question(_NAME, x.nbytes // size, x.dtype, along, row_bytes, ordered, algo)


def reduce_scatter_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, dim: int
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    if choice.algorithm == "lamport":
        return lamport_reduce_scatter_launch(workspace, choice, out, x, dim)
    from pcomm.nvls.kernels.reduce_scatter import reduce_scatter_kernel

    turn = workspace.turn()
    num_vectors = out.nbytes // VECTOR_BYTES
    row_vectors = out.shape[-1] * out.itemsize // VECTOR_BYTES if dim == -1 else num_vectors
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": num_vectors,
        "row_vectors": row_vectors,
        "slot": workspace.regions.slot(turn.slot),
        "WAY": way_of(choice),
        "KIND": kind_of(x.dtype),
        "ENTRY": turn.needs_entry,
        "IN_PLACE": workspace.is_in_slot(x, turn),
        "BLOCK": 32 * choice.num_warps,
    }
    blocks, warps, device = choice.num_blocks, choice.num_warps, workspace.device
    return Launch(reduce_scatter_kernel, blocks, warps, arguments, device, (x, out))


def _result_shape(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    length = shape[dim] if -x.dim() <= dim < x.dim() else None
    if length is None or length % size:
        raise LayoutError(
            f"{_NAME}: dim={dim} among {size} ranks",
            found=f"a tensor of shape {tuple(x.shape)}",
            why="Each rank gets a segment of the same length.",
            fix=f"Name a dimension whose length is a multiple of {size}, or pad it.",
        )
    shape[dim] = length // size
    return tuple(shape)
