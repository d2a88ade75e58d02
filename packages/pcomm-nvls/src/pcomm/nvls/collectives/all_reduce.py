"""All-reduce: every rank gets the sum over all ranks."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.nvls.collectives.inputs import (
    VECTOR_BYTES,
    check_input,
    dense,
    kind_of,
    way_of,
)
from pcomm.nvls.collectives.lamport_launches import lamport_all_reduce_launch
from pcomm.nvls.collectives.outputs import apart, check_result, deliver, result_in
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.policy.shots import is_one_shot
from pcomm.nvls.references.all_reduce import all_reduce as reference
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.repeats import Call, again
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["all_reduce", "all_reduce_launch", "all_reduce_question"]

_NAME = "all_reduce"


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
        ConfigError: `out` lies in the workspace, or `x` in a part of it that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    key = (_NAME, x.shape, x.dtype, algo)
    done = again(workspace, key, x, out)
    if done is not None:
        return done
    check_input(_NAME, x, workspace.device)
    question = all_reduce_question(x, workspace, algo)
    choice = workspace.choose(question, strict=strict, detail=x.shape)
    check_result(_NAME, out, tuple(x.shape), x, workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        given = workspace.group.collectives
        ordered = workspace.deterministic
        found = reference(x, out=out, collectives=given, deterministic=ordered)
        return apart(found, x, out)
    result = result_in(out, tuple(x.shape), x)
    if x.numel():
        x = not_over(dense(x), result, 0)
        workspace.run(all_reduce_launch(workspace, choice, result, x), Call(key, x, result, 0))
    return deliver(result, out)


def all_reduce_question(
    x: Tensor, workspace: Workspace, algo: Algorithm | Literal["auto"] = "auto"
) -> Question:
    """What the algorithm of a call is chosen by. Local."""
    ordered = workspace.deterministic
    return Question(_NAME, x.nbytes, x.dtype, deterministic=ordered, algorithm=algo)


def all_reduce_launch(workspace: Workspace, choice: Choice, out: Tensor, x: Tensor) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    if choice.algorithm == "lamport":
        return lamport_all_reduce_launch(workspace, choice, out, x)
    from pcomm.nvls.kernels.all_reduce import one_shot_all_reduce_kernel, two_shot_all_reduce_kernel

    turn = workspace.turn()
    way = way_of(choice)
    arguments = {
        **workspace.shared_arguments(),
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": x.nbytes // VECTOR_BYTES,
        "slot": workspace.regions.slot(turn.slot),
        "WAY": way,
        "KIND": kind_of(x.dtype),
        "ENTRY": turn.needs_entry,
        "IN_PLACE": workspace.is_in_slot(x, turn),
        "BLOCK": 32 * choice.num_warps,
    }
    one_shot = is_one_shot(x.nbytes, workspace.group.size, way, workspace.capability.architecture)
    kernel = one_shot_all_reduce_kernel if one_shot else two_shot_all_reduce_kernel
    blocks, warps, device = choice.num_blocks, choice.num_warps, workspace.device
    return Launch(kernel, blocks, warps, arguments, device, (x, out))
