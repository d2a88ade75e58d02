"""Gather to one rank, such as that of logits to the rank that samples."""

from __future__ import annotations

from operator import index
from typing import Literal

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.core.errors import LayoutError, TopologyError
from pcomm.nvls.collectives.inputs import (
    VECTOR_BYTES,
    check_input,
    dense,
    kernel_dim,
    way_of,
)
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
from pcomm.nvls.references.gather_to_rank import gather_to_rank as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["gather_to_rank", "gather_to_rank_launch"]

_NAME = "gather_to_rank"


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
    check_input(_NAME, x, workspace.device)
    size, rank = workspace.group.size, workspace.group.rank
    destination = index(destination)
    if not 0 <= destination < size:
        raise TopologyError(
            f"{_NAME}: destination={destination}",
            found=f"a group of {size} ranks",
            why="The destination is a place in the group, and not a rank of the whole job.",
            fix=f"Name a place from 0 to {size - 1}.",
        )
    along = kernel_dim(x, dim)
    shape = _result_shape(x, dim, size)
    row_bytes = x.shape[-1] * x.itemsize if along == -1 else None
    question = Question(
        _NAME, x.nbytes, x.dtype, along, row_bytes, workspace.deterministic, algo
    )  # fmt: skip
    told = (x.shape, f"destination {destination}")
    choice = workspace.choose(question, strict=strict, detail=told)
    is_here = rank == destination
    check_result(_NAME, out if is_here else None, shape, x, workspace)
    check_inputs_outside(_NAME, x, workspace=workspace)
    if choice.algorithm == "dist":
        given = workspace.group.collectives
        found = reference(x, out=out, collectives=given, destination=destination, dim=dim)
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
    workspace: Workspace,
    choice: Choice,
    out: Tensor | None,
    x: Tensor,
    destination: int,
    dim: int,
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.gather_to_rank import gather_to_rank_kernel

    turn = workspace.turn()
    num_vectors = x.nbytes // VECTOR_BYTES
    row_vectors = x.shape[-1] * x.itemsize // VECTOR_BYTES if dim == -1 else num_vectors
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        # Not used on other ranks; an address all the same, so that one kernel serves them all.
        "out": x.data_ptr() if out is None else out.data_ptr(),
        "num_vectors": num_vectors,
        "row_vectors": row_vectors,
        "destination": destination,
        "slot": workspace.regions.slot(turn.slot),
        "WAY": way_of(choice),
        "ENTRY": turn.needs_entry,
        "COPY_OUT": True,
        "BLOCK": 32 * choice.num_warps,
    }
    return Launch(
        gather_to_rank_kernel,
        choice.num_blocks,
        choice.num_warps,
        arguments,
        workspace.device,
        (x,) if out is None else (x, out),
    )


def _result_shape(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape)
    if not -x.dim() <= dim < x.dim():
        raise LayoutError(
            f"{_NAME}: dim={dim}",
            found=f"a tensor of shape {tuple(x.shape)}",
            why="Shards lie along a dimension of the tensor.",
            fix="Name a dimension that it has; give a single number one by x.view(1).",
        )
    shape[dim] *= size
    return tuple(shape)
