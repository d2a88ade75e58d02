"""All-gather of several tensors at once: one launch and one barrier for up to eight of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
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
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.references.all_gather_coalesced import all_gather_coalesced as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["MOST_TENSORS", "all_gather_coalesced", "all_gather_coalesced_launch"]

_NAME = "all_gather_coalesced"

MOST_TENSORS = 8
"""Tensors of one launch: the kernel has three arguments for each."""


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
    shapes = [_result_shape(x, workspace.group.size) for x in xs]
    if len(wanted) != len(xs):
        raise LayoutError(
            f"{_NAME}: {len(xs)} tensors",
            found=f"{len(wanted)} tensors for the results",
            why="Each tensor has one result.",
            fix="Pass as many, with None for a new tensor, or no outs.",
        )
    for x in xs:
        check_input(_NAME, x, workspace.device)
    for i, out in enumerate(wanted):
        if out is not None:
            # Only its own shard is written back where it has been read.
            own = workspace.group.rank * xs[i].nbytes
            xs = [not_over(x, out, own if i == j else None) for j, x in enumerate(xs)]
    gathered: list[Tensor] = []
    for start in range(0, len(xs), MOST_TENSORS):
        some = slice(start, start + MOST_TENSORS)
        gathered += _gather(wanted[some], xs[some], shapes[some], workspace, algo, strict)
    return gathered


def _gather(
    outs: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    workspace: Workspace,
    algo: Algorithm | Literal["auto"],
    strict: bool,
) -> list[Tensor]:
    """One launch, or the reference."""
    sizes = [x.nbytes for x in xs]
    question = Question(_NAME, sum(sizes), torch.uint8, row_bytes=math.gcd(*sizes), algorithm=algo)
    tensors = [(tuple(x.shape), x.dtype) for x in xs]
    choice = workspace.choose(question, strict=strict, detail=tensors)
    for out, shape, x in zip(outs, shapes, xs, strict=True):
        check_result(_NAME, out, shape, x, workspace)
    check_inputs_outside(_NAME, *xs, workspace=workspace)
    if choice.algorithm == "dist":
        found = reference(xs, outs=outs, collectives=workspace.group.collectives)
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
    from pcomm.nvls.kernels.all_gather_coalesced import all_gather_coalesced_kernel

    turn = workspace.turn()
    tensors: dict[str, Any] = {}
    for i in range(MOST_TENSORS):
        # The arguments of tensors that are not there have the types of those that are.
        out, x = pairs[min(i, len(pairs) - 1)]
        tensors[f"x{i}"], tensors[f"out{i}"] = x.data_ptr(), out.data_ptr()
        tensors[f"n{i}"] = x.nbytes // VECTOR_BYTES
    arguments = {
        **workspace.shared_arguments(),
        **tensors,
        "slot": workspace.regions.slot(turn.slot),
        "TENSORS": len(pairs),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "BLOCK": 32 * choice.num_warps,
    }
    blocks, warps, device = choice.num_blocks, choice.num_warps, workspace.device
    used = tuple(chain.from_iterable(pairs))
    return Launch(all_gather_coalesced_kernel, blocks, warps, arguments, device, used)


def _result_shape(x: Tensor, size: int) -> tuple[int, ...]:
    if not x.dim():
        raise LayoutError(
            f"{_NAME}: a tensor of shape ()",
            found="no dimension",
            why="Shards lie along the first dimension.",
            fix="Give a single number one by x.view(1).",
        )
    return (x.shape[0] * size, *x.shape[1:])
