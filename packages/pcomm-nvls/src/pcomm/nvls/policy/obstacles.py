"""Reasons why an algorithm cannot run for a call, whatever its speed."""

from __future__ import annotations

from typing import NamedTuple

from pcomm.nvls.policy.facts import Facts, Question
from pcomm.nvls.policy.operations import Algorithm, operation_named
from pcomm.nvls.primitives.lamport_numbers import sent_bytes

__all__ = ["Reason", "obstacle"]

# All kernels move words of 16 bytes.
_WORD_BYTES = 16
# Names, so that a choice can be made and tested without torch.
_SUMMED_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


class Reason(NamedTuple):
    """A reason against an algorithm.

    Attributes:
        text: Sentence without numbers that vary from call to call, so that it can be logged once.
        is_loss: True if speed is lost that another machine, workspace or shape would have.
    """

    text: str
    is_loss: bool = False


def obstacle(facts: Facts, question: Question, algorithm: Algorithm) -> Reason | None:
    """The first reason why an algorithm cannot run, or None if it can. `dist` always can.

    Args:
        facts: Facts about the group and its workspace.
        question: Call that an algorithm is chosen for.
        algorithm: Algorithm that is examined.
    """
    operation = operation_named(question.operation)
    if algorithm == "dist":
        return None
    if algorithm not in operation.algorithms:
        return Reason(f"{operation.name} has no such kernel")
    if operation.reduces and question.deterministic and algorithm == "multimem":
        return Reason("the switch does not add in the order of the ranks")
    lost = _no_memory(facts, algorithm) or _in_the_call(facts, question, algorithm)
    return Reason(lost, is_loss=True) if lost else None


def _no_memory(facts: Facts, algorithm: Algorithm) -> str | None:
    if algorithm == "multimem":
        there, what, reason = facts.multicast, "no multicast address", facts.multicast_reason
    else:
        there, what, reason = facts.peers, "no pointers to peers", facts.peers_reason
    if there:
        return None
    return f"the group has {what} ({reason})" if reason else f"the group has {what}"


def _in_the_call(facts: Facts, question: Question, algorithm: Algorithm) -> str | None:
    operation = operation_named(question.operation)
    row_bytes = question.num_bytes if question.row_bytes is None else question.row_bytes
    if question.dim not in operation.dims:
        dims = " and ".join(map(str, operation.dims))
        return f"{operation.name} has kernels for dimension {dims}, not for {question.dim}"
    if operation.reduces and str(question.dtype) not in _SUMMED_DTYPES:
        return f"kernels do not add {question.dtype}"
    if question.num_bytes % _WORD_BYTES:
        return f"the message is no multiple of {_WORD_BYTES} bytes"
    if row_bytes % _WORD_BYTES:
        return f"a row is no multiple of {_WORD_BYTES} bytes"
    sent = sent_bytes(question.num_bytes, question.dtype)
    if algorithm == "lamport" and sent > facts.lamport_bytes:
        return f"a rank sends more than lamport_bytes of the workspace, {facts.lamport_bytes} bytes"
    if operation.slot_bytes(algorithm, question.num_bytes, facts.world_size) > facts.slot_bytes:
        return f"it needs more than a slot of the workspace, {facts.slot_bytes} bytes"
    return None
