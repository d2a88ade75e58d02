"""All-reduce, and reduce-scatter, of which every rank gets its segment along a dimension."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from pcomm.core.collectives.checks import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls import references
from pcomm.nvls.collectives.call import (
    VECTOR_BYTES,
    again,
    apart,
    barrier_launch,
    check_input,
    check_result,
    deliver,
    dense,
    kernel_dim,
    kind_of,
    lamport_launch,
    outside,
    peers_at_a_time,
    result_in,
    row_vectors,
    way_of,
)
from pcomm.nvls.policy.choose import Choice, CollectiveRequest, is_one_shot
from pcomm.nvls.policy.table import Algorithm
from pcomm.nvls.workspace.launch import CachedCall, Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "all_reduce",
    "all_reduce_launch",
    "all_reduce_question",
    "reduce_scatter_launch",
    "reduce_scatter_question",
    "reduce_scatter_tensor",
]

_ALL_REDUCE, _REDUCE_SCATTER = "all_reduce", "reduce_scatter_tensor"


def all_reduce(
    x: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> Tensor:
    """The sum of `x` over all ranks, on every rank. Collective; no synchronisation.

    bf16, fp16 and fp32 are added in fp32 and rounded once: in rank order ("p2p", "lamport"), or in
    the order of the switch ("multimem"). Other types go through torch.distributed, whose order is
    the backend's unless the workspace is deterministic.

    Args:
        x: This rank's tensor, of any strides and the same shape on all ranks. Where it is what
            `workspace.empty` returned last, it is not copied.
        out: Tensor for the result, of any strides; None for a new one. It may be `x`, or lie over
            it.
        workspace: Workspace of the group.
        algo: "lamport", "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        Shape, dtype and device of `x`.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        LayoutError: `out` does not fit, or `x` is on another device.
        ConfigError: `out` lies in the workspace, or `x` in a part of it that is in use, which
            only algorithms with a barrier refuse: without one nothing ends before all have read it.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    try:
        key = (_ALL_REDUCE, x.shape, x.dtype, algo)
    except AttributeError:
        check_input(_ALL_REDUCE, x, workspace.device)
        raise
    done = again(workspace, key, x, out)
    if done is not None:
        return done
    check_input(_ALL_REDUCE, x, workspace.device)
    question = all_reduce_question(x, workspace, algo)
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_ALL_REDUCE, out, tuple(x.shape), x, workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        given = workspace.group.collectives
        ordered = workspace.deterministic
        found = references.all_reduce(x, out=out, collectives=given, deterministic=ordered)
        return apart(found, x, out)
    result = result_in(out, tuple(x.shape), x)
    if x.numel():
        x = not_over(dense(x), result, 0)
        workspace.run(
            all_reduce_launch(workspace, choice, result, x), CachedCall(key, x, result, 0)
        )
    return deliver(result, out)


def all_reduce_question(
    x: Tensor, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> CollectiveRequest:
    """What the algorithm of a call is chosen by. Local."""
    ordered = workspace.deterministic
    return CollectiveRequest(_ALL_REDUCE, x.nbytes, x.dtype, deterministic=ordered, algorithm=algo)


def all_reduce_launch(workspace: Workspace, choice: Choice, out: Tensor, x: Tensor) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.reductions import (
        lamport_all_reduce_kernel,
        one_shot_all_reduce_kernel,
        two_shot_all_reduce_kernel,
    )

    lease, kind = workspace.turn(), kind_of(x.dtype)
    if choice.algorithm == "lamport":
        kernel, only = lamport_all_reduce_kernel, {"KIND": kind}
        return lamport_launch(kernel, workspace, choice, out, x, x.nbytes, only)
    arguments: dict[str, Any] = {
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": x.nbytes // VECTOR_BYTES,
        "KIND": kind,
        "IN_PLACE": workspace.is_in_slot(x, lease),
    }
    architecture = workspace.capability.architecture
    one_shot = is_one_shot(x.nbytes, workspace.group.size, way_of(choice), architecture)
    kernel = one_shot_all_reduce_kernel if one_shot else two_shot_all_reduce_kernel
    # A rank has a segment at a time of two shots.
    shared = arguments["num_vectors"] // (1 if one_shot else workspace.group.size)
    return barrier_launch(kernel, workspace, choice, lease, arguments, (x, out), shared)


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
    try:
        key = (_REDUCE_SCATTER, x.shape, x.dtype, dim, algo)
    except AttributeError:
        check_input(_REDUCE_SCATTER, x, workspace.device)
        raise
    done = again(workspace, key, x, out)
    if done is not None:
        return done
    check_input(_REDUCE_SCATTER, x, workspace.device)
    shape = _segment_shape(x, dim, workspace.group.size)
    question = reduce_scatter_question(x, dim, workspace, algo)
    along = question.dim
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_REDUCE_SCATTER, out, shape, x, workspace)
    if choice.algorithm == "dist":
        x = outside(x, workspace)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        found = references.reduce_scatter_tensor(
            x, out=out, collectives=given, dim=dim, deterministic=ordered
        )
        return apart(found, x, out)
    result = result_in(out, shape, x)
    if x.numel():
        # A block sums a segment where it has read it, so that may be the same memory.
        place = -workspace.group.rank * result.nbytes if along == 0 else None
        x = not_over(dense(x), result, place)
        launch = reduce_scatter_launch(workspace, choice, result, x, along)
        workspace.run(launch, CachedCall(key, x, result, place))
    return deliver(result, out)


def reduce_scatter_question(
    x: Tensor, dim: int, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> CollectiveRequest:
    """What the algorithm of a call is chosen by. Local."""
    along, size = kernel_dim(x, dim), workspace.group.size
    row_bytes = x.shape[-1] // size * x.itemsize if along == -1 else None
    ordered = workspace.deterministic
    return CollectiveRequest(
        _REDUCE_SCATTER, x.nbytes // size, x.dtype, along, row_bytes, ordered, algo
    )


def reduce_scatter_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, dim: int
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.reductions import lamport_reduce_scatter_kernel, reduce_scatter_kernel

    lease = workspace.turn()
    # Also without a barrier: in the slot of another turn, a rank that has its segment could store
    # with the next operation before this one has read what it sends to a third rank.
    in_place = workspace.is_in_slot(x, lease)
    arguments: dict[str, Any] = {
        "row_vectors": row_vectors(out, dim),
        "KIND": kind_of(x.dtype),
    }
    if choice.algorithm == "lamport":
        arguments["PEERS"] = peers_at_a_time(workspace.group.size)
        kernel = lamport_reduce_scatter_kernel
        launch = lamport_launch(kernel, workspace, choice, out, x, out.nbytes, arguments)
        # A segment has one receiver: there is nothing for a multicast to do.
        del launch.arguments["multicast"], launch.arguments["WAY"]
        return launch
    arguments |= {
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": out.nbytes // VECTOR_BYTES,
        "IN_PLACE": in_place,
    }
    kernel, shared = reduce_scatter_kernel, arguments["num_vectors"]
    return barrier_launch(kernel, workspace, choice, lease, arguments, (x, out), shared)


def _segment_shape(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    length = shape[dim] if -x.dim() <= dim < x.dim() else None
    if length is None or length % size:
        raise LayoutError(
            f"{_REDUCE_SCATTER}: dim={dim} among {size} ranks",
            found=f"a tensor of shape {tuple(x.shape)}",
            why="Each rank gets a segment of the same length.",
            fix=f"Name a dimension whose length is a multiple of {size}, or pad it.",
        )
    shape[dim] = length // size
    return tuple(shape)
