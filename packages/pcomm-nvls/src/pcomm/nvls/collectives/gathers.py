"""All-gather of one tensor and of several, and gather to one rank, such as that of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from pcomm.core.collectives.checks import not_over
from pcomm.core.errors import LayoutError, TopologyError
from pcomm.nvls import references
from pcomm.nvls.collectives.call import (
    VECTOR_BYTES,
    again,
    apart,
    barrier_launch,
    check_input,
    check_inputs_outside,
    check_result,
    deliver,
    dense,
    kernel_dim,
    lamport_launch,
    peers_at_a_time,
    result_in,
    row_vectors,
)
from pcomm.nvls.policy.choose import Choice, CollectiveRequest
from pcomm.nvls.policy.table import Algorithm
from pcomm.nvls.primitives.lamport_numbers import is_spread
from pcomm.nvls.workspace.launch import CachedCall, Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "MOST_TENSORS",
    "all_gather_coalesced",
    "all_gather_coalesced_launch",
    "all_gather_into_tensor",
    "all_gather_launch",
    "all_gather_question",
    "gather_to_rank",
    "gather_to_rank_launch",
]

_ALL_GATHER, _COALESCED = "all_gather_into_tensor", "all_gather_coalesced"
_GATHER_TO_RANK = "gather_to_rank"

MOST_TENSORS = 8
"""Tensors of one launch: the kernel has three arguments for each."""


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
    try:
        key = (_ALL_GATHER, x.shape, x.dtype, dim, algo)
    except AttributeError:
        check_input(_ALL_GATHER, x, workspace.device)
        raise
    done = again(workspace, key, x, out) if copy else None
    if done is not None:
        return done
    check_input(_ALL_GATHER, x, workspace.device)
    shape = _gathered_shape(_ALL_GATHER, x, dim, workspace.group.size)
    question = all_gather_question(x, dim, workspace, algo)
    along = question.dim
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_ALL_GATHER, out, shape, x, workspace)
    check_inputs_outside(_ALL_GATHER, x, workspace=workspace)
    if choice.algorithm == "dist":
        found = references.all_gather_into_tensor(
            x, out=out, collectives=workspace.group.collectives, dim=dim
        )
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
        workspace.run(launch, CachedCall(key, x, result, place))
    return deliver(result, out)


def all_gather_question(
    x: Tensor, dim: int, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> CollectiveRequest:
    """What the algorithm of a call is chosen by. Local."""
    along = kernel_dim(x, dim)
    row_bytes = x.shape[-1] * x.itemsize if along == -1 else None
    return CollectiveRequest(
        _ALL_GATHER, x.nbytes, x.dtype, along, row_bytes, workspace.deterministic, algo
    )


def all_gather_launch(
    workspace: Workspace, choice: Choice, out: Tensor | None, x: Tensor, dim: int
) -> Launch:
    """The launch that a choice asks for; without `out` the result stays in the slot. A turn."""
    if choice.algorithm == "lamport":
        from pcomm.nvls.kernels.gathers import lamport_all_gather_kernel

        assert out is not None
        workspace.turn()
        arguments = {
            "row_vectors": row_vectors(x, dim),
            "SPREAD": is_spread(x.dtype),
            "PEERS": peers_at_a_time(workspace.group.size),
        }
        kernel = lamport_all_gather_kernel
        return lamport_launch(kernel, workspace, choice, out, x, x.nbytes, arguments)
    from pcomm.nvls.kernels.gathers import all_gather_kernel

    arguments = {
        "x": x.data_ptr(),
        "out": 0 if out is None else out.data_ptr(),
        "num_vectors": x.nbytes // VECTOR_BYTES,
        "row_vectors": row_vectors(x, dim),
        "COPY_OUT": out is not None,
    }
    tensors = (x,) if out is None else (x, out)
    kernel, lease, shared = all_gather_kernel, workspace.turn(), arguments["num_vectors"]
    return barrier_launch(kernel, workspace, choice, lease, arguments, tensors, shared)


def _gathered_shape(operation: str, x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    if not -x.dim() <= dim < x.dim():
        raise LayoutError(
            f"{operation}: dim={dim}",
            found=f"a tensor of shape {tuple(x.shape)}",
            why="Shards lie along a dimension of the tensor.",
            fix="Name a dimension that it has; give a single number one by x.view(1).",
        )
    shape[dim] *= size
    return tuple(shape)


def all_gather_coalesced(
    xs: Sequence[Tensor],
    *,
    outs: Sequence[Tensor | None] | None = None,
    workspace: Workspace,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> list[Tensor]:
    """For each tensor the shards of all ranks, in rank order along dimension 0. Collective.

    It does not synchronise with the device. More than `MOST_TENSORS` tensors are several launches.

    Args:
        xs: This rank's shards, of any dtypes and strides; the same shapes on all ranks.
        outs: Tensors for the results, of any strides, each None for a new one; None for new ones
            only. They may lie over `xs`, and not over each other.
        workspace: Workspace of the group. A launch needs room for its results together.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        `[n * size, ...]` for each tensor, with its dtype and device: bit for bit what the ranks
        passed.

    Raises:
        UnsupportedError: Gradients are recorded for a tensor, or `algo` or `strict` cannot be met.
        LayoutError: The numbers of tensors differ, a tensor has no dimension or is on another
            device, or one of `outs` does not fit.
        ConfigError: One of `outs` or `xs` lies in the workspace.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    wanted = [None] * len(xs) if outs is None else list(outs)
    for x in xs:
        check_input(_COALESCED, x, workspace.device)
    shapes = [_stacked_shape(x, workspace.group.size) for x in xs]
    if len(wanted) != len(xs):
        raise LayoutError(
            f"{_COALESCED}: {len(xs)} tensors",
            found=f"{len(wanted)} tensors for the results",
            why="Each tensor has one result.",
            fix="Pass as many, with None for a new tensor, or no outs.",
        )
    for i, out in enumerate(wanted):
        if out is not None:
            # Only its own shard is written back where it has been read.
            own = workspace.group.rank * xs[i].nbytes
            xs = [not_over(x, out, own if i == j else None) for j, x in enumerate(xs)]
    gathered: list[Tensor] = []
    for start in range(0, len(xs), MOST_TENSORS):
        some = slice(start, start + MOST_TENSORS)
        gathered += _gather_some(wanted[some], xs[some], shapes[some], workspace, algo, strict)
    return gathered


def _gather_some(
    outs: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    workspace: Workspace,
    algo: Algorithm | Literal["auto"],
    strict: bool,
) -> list[Tensor]:
    """One launch, or the reference."""
    sizes = [x.nbytes for x in xs]
    question = CollectiveRequest(
        _COALESCED, sum(sizes), torch.uint8, row_bytes=math.gcd(*sizes), algorithm=algo
    )
    tensors = [(tuple(x.shape), x.dtype) for x in xs]
    choice = workspace.choose(question, strict=strict, detail=tensors)
    for out, shape, x in zip(outs, shapes, xs, strict=True):
        check_result(_COALESCED, out, shape, x, workspace)
    check_inputs_outside(_COALESCED, *xs, workspace=workspace)
    if choice.algorithm == "dist":
        found = references.all_gather_coalesced(
            xs, outs=outs, collectives=workspace.group.collectives
        )
        return [apart(*one) for one in zip(found, xs, outs, strict=True)]
    results = [result_in(out, shape, x) for out, shape, x in zip(outs, shapes, xs, strict=True)]
    filled = [(result, dense(x)) for result, x in zip(results, xs, strict=True) if x.numel()]
    if filled:
        launch = all_gather_coalesced_launch(workspace, choice, filled)
        workspace.run(launch)
    return [deliver(result, out) for out, result in zip(outs, results, strict=True)]


def all_gather_coalesced_launch(
    workspace: Workspace, choice: Choice, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace.

    Args:
        workspace: Workspace of the group.
        choice: Algorithm and grid.
        pairs: A result and a shard for each tensor, dense, 1 to `MOST_TENSORS` pairs.
    """
    from pcomm.nvls.kernels.gathers import all_gather_coalesced_kernel

    arguments: dict[str, Any] = {"TENSORS": len(pairs)}
    for i in range(MOST_TENSORS):
        # The arguments of tensors that are not there have the types of those that are.
        out, x = pairs[min(i, len(pairs) - 1)]
        arguments[f"x{i}"], arguments[f"out{i}"] = x.data_ptr(), out.data_ptr()
        arguments[f"n{i}"] = x.nbytes // VECTOR_BYTES
    kernel, used = all_gather_coalesced_kernel, tuple(chain.from_iterable(pairs))
    # All blocks share each tensor.
    shared = min(x.nbytes for _, x in pairs) // VECTOR_BYTES
    return barrier_launch(kernel, workspace, choice, workspace.turn(), arguments, used, shared)


def _stacked_shape(x: Tensor, size: int) -> tuple[int, ...]:
    if not x.dim():
        raise LayoutError(
            f"{_COALESCED}: a tensor of shape ()",
            found="no dimension",
            why="Shards lie along the first dimension.",
            fix="Give a single number one by x.view(1).",
        )
    return (x.shape[0] * size, *x.shape[1:])


def gather_to_rank(
    x: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Workspace,
    destination: int = 0,
    dim: int = 0,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> Tensor | None:
    """The shards of all ranks, in rank order along `dim`, on one rank. Collective.

    It does not synchronise with the device. Each shard is sent once, where an all-gather sends it
    to every rank.

    Args:
        x: This rank's shard, of any dtype and strides; the same shape on all ranks.
        out: Tensor for the result, of any strides; None for a new one. Only used on `destination`.
        workspace: Workspace of the group.
        destination: Place in the group of the rank that gets the result; the same on all ranks.
        dim: Dimension along which the shards lie: 0, or the last one. Both are written in place;
            another one goes through torch.distributed.
        algo: "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        `[..., n * size, ...]`, dtype and device of `x`, on `destination`; None on the others.

    Raises:
        UnsupportedError: Gradients are recorded for `x`, or `algo` or `strict` cannot be met.
        TopologyError: `destination` is no place in the group.
        LayoutError: `out` does not fit, or `x` is on another device.
        ConfigError: `out` or `x` lies in the workspace.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    check_input(_GATHER_TO_RANK, x, workspace.device)
    size, rank = workspace.group.size, workspace.group.rank
    destination = index(destination)
    if not 0 <= destination < size:
        raise TopologyError(
            f"{_GATHER_TO_RANK}: destination={destination}",
            found=f"a group of {size} ranks",
            why="The destination is a place in the group, and not a rank of the whole job.",
            fix=f"Name a place from 0 to {size - 1}.",
        )
    along = kernel_dim(x, dim)
    shape = _gathered_shape(_GATHER_TO_RANK, x, dim, size)
    row_bytes = x.shape[-1] * x.itemsize if along == -1 else None
    question = CollectiveRequest(
        _GATHER_TO_RANK, x.nbytes, x.dtype, along, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (x.shape, f"destination {destination}")
    choice = workspace.choose(question, strict=strict, detail=told)
    is_here = rank == destination
    check_result(_GATHER_TO_RANK, out if is_here else None, shape, x, workspace)
    check_inputs_outside(_GATHER_TO_RANK, x, workspace=workspace)
    if choice.algorithm == "dist":
        given = workspace.group.collectives
        found = references.gather_to_rank(
            x, out=out, collectives=given, destination=destination, dim=dim
        )
        return None if found is None else apart(found, x, out)
    # Not made where it is not needed: logits are large.
    result = result_in(out, shape, x) if is_here else None
    # A launch has the address alone: a copy has to live until it runs.
    x = dense(x)
    if result is not None:
        x = not_over(x, result)
    if x.numel():
        workspace.run(gather_to_rank_launch(workspace, choice, result, x, destination, along))
    return None if result is None else deliver(result, out)


def gather_to_rank_launch(
    workspace: Workspace, choice: Choice, out: Tensor | None, x: Tensor, destination: int, dim: int
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.gathers import gather_to_rank_kernel

    arguments = {
        "x": x.data_ptr(),
        # Not used on other ranks; an address all the same, so that one kernel serves them all.
        "out": x.data_ptr() if out is None else out.data_ptr(),
        "num_vectors": x.nbytes // VECTOR_BYTES,
        "row_vectors": row_vectors(x, dim),
        "destination": destination,
    }
    tensors, kernel = (x,) if out is None else (x, out), gather_to_rank_kernel
    lease, shared = workspace.turn(), arguments["num_vectors"]
    return barrier_launch(kernel, workspace, choice, lease, arguments, tensors, shared)
