"""A choice in words: which algorithm runs, why, and why not each of the faster ones."""

from __future__ import annotations

from pcomm.nvls.policy.choose import Choice, choose
from pcomm.nvls.policy.facts import Facts, Question
from pcomm.nvls.policy.operations import operation_named
from pcomm.nvls.policy.table import Table

__all__ = ["described", "explain"]


def explain(facts: Facts, question: Question, table: Table) -> str:
    """Text that says which algorithm runs for a call, why, and why not each faster one. Local.

    Args:
        facts: Facts about the group and its workspace.
        question: Call that an algorithm is chosen for.
        table: Thresholds and launches.

    Raises:
        ConfigError: An unknown operation or algorithm, or a negative size.
    """
    choice = choose(facts, question, table)
    launch = f", {choice.num_blocks} blocks of {choice.num_warps} warps"
    head = f"{described(facts, question)}: {choice.algorithm}"
    lines = [f"{head}{launch if choice.num_blocks else ''}", f"  {_why(choice)}"]
    return "\n".join([*lines, *(f"  not {reason}" for reason in choice.reasons)])


def described(facts: Facts, question: Question) -> str:
    """A question and the group that it is asked for, in one line."""
    message = operation_named(question.operation).message
    dtype = str(question.dtype).removeprefix("torch.")
    sums = ", deterministic" if question.deterministic else ""
    dim = f", dimension {question.dim}" if question.dim else ""
    return (
        f"{question.operation} of {question.num_bytes} bytes ({message}) of {dtype}{dim}{sums} on "
        f"{facts.world_size} ranks of {facts.architecture}"
    )


def _why(choice: Choice) -> str:
    return f"{choice.algorithm}: {choice.because}"
