"""The choice of an algorithm as a pure function, so that all ranks choose alike without talking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError, near_misses
from pcomm.nvls.policy.bands import Row
from pcomm.nvls.policy.facts import Facts, Question
from pcomm.nvls.policy.obstacles import Reason, obstacle
from pcomm.nvls.policy.operations import ALGORITHMS, Algorithm, operation_named
from pcomm.nvls.policy.table import Table

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """An algorithm with its launch and its reasons.

    Attributes:
        algorithm: Algorithm to run; `dist` is the reference, made of collectives of the group. For
            a deterministic question that has to add in the order of the ranks, too.
        num_blocks: Number of CTAs; 0 for `dist`.
        num_warps: Number of warps of each CTA; 0 for `dist`.
        because: Phrase that says why it was chosen.
        reasons: Reasons against the algorithms that come before it, `ALGORITHM: REASON` each.
        losses: Those of the reasons that another machine, workspace or shape would not have.
    """

    algorithm: Algorithm
    num_blocks: int
    num_warps: int
    because: str
    reasons: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


def choose(facts: Facts, question: Question, table: Table) -> Choice:
    """Choose the algorithm of a call. Local, and equal on ranks whose arguments are equal.

    The rows of the table are tried in their order, fastest first: the first one that the message
    is not too large for, and whose algorithm can run, is the choice. Without one it is `dist`. A
    named algorithm is the choice at every size if it can run, and `dist` if it cannot. One rank has
    nothing to move, and takes `dist` always.

    Args:
        facts: Facts about the group and its workspace.
        question: Call that an algorithm is chosen for.
        table: Thresholds and launches.

    Raises:
        ConfigError: An unknown operation or algorithm, or a negative size.
    """
    _check(question)
    if facts.world_size == 1:
        # Also where an algorithm is named: nothing is lost.
        return _choice(None, "one rank has nothing to move", {})
    rows = table.rows(facts.architecture, question.operation, facts.world_size)
    if question.algorithm == "auto":
        return _fastest(facts, question, rows)
    return _named(facts, question, rows, question.algorithm)


def _fastest(facts: Facts, question: Question, rows: Sequence[Row]) -> Choice:
    against: dict[Algorithm, Reason] = {}
    for row in rows:
        reason = _against_row(facts, question, row)
        if reason is None:
            against.pop(row.algorithm, None)
            because = f"it is preferred up to {row.max_bytes} bytes ({row.source})"
            return _choice(row, because, against)
        against[row.algorithm] = reason
    for algorithm in ALGORITHMS:
        if algorithm != "dist" and algorithm not in against:
            missing = Reason(_no_row(facts, question), is_loss=not rows)
            against[algorithm] = obstacle(facts, question, algorithm) or missing
    against.pop("dist", None)
    return _choice(None, "no other algorithm is left", against)


def _against_row(facts: Facts, question: Question, row: Row) -> Reason | None:
    if row.algorithm == "multimem" and facts.world_size == 2:
        return Reason("between 2 ranks it moves more bytes than pointers to peers do")
    reason = obstacle(facts, question, row.algorithm)
    if question.num_bytes <= row.max_bytes or (reason is not None and not reason.is_loss):
        return reason
    # A loss would be none here: the table would not have taken the algorithm at this size.
    return Reason(f"it is preferred up to {row.max_bytes} bytes")


def _named(facts: Facts, question: Question, rows: Sequence[Row], algorithm: Algorithm) -> Choice:
    named = "it was asked for by name"
    if algorithm == "dist":
        return _choice(None, named, {})
    own = [row for row in rows if row.algorithm == algorithm]
    reason = obstacle(facts, question, algorithm)
    if reason is None and not own:
        reason = Reason(_no_row(facts, question), is_loss=True)
    if reason is not None:
        return _choice(None, f"{algorithm} cannot run", {algorithm: reason})
    # Beyond its last threshold it keeps the launch of the largest messages.
    return _choice(
        next((row for row in own if question.num_bytes <= row.max_bytes), own[-1]), named, {}
    )


def _choice(row: Row | None, because: str, against: Mapping[Algorithm, Reason]) -> Choice:
    reasons = tuple(f"{algorithm}: {reason.text}" for algorithm, reason in against.items())
    losses = tuple(f"{algorithm}: {r.text}" for algorithm, r in against.items() if r.is_loss)
    if row is None:
        return Choice("dist", 0, 0, because, reasons, losses)
    return Choice(row.algorithm, row.num_blocks, row.num_warps, because, reasons, losses)


def _no_row(facts: Facts, question: Question) -> str:
    where = f"{question.operation} between {facts.world_size} ranks of {facts.architecture}"
    return f"the table has no row of it for {where}"


def _check(question: Question) -> None:
    operation_named(question.operation)
    known = ("auto", *ALGORITHMS)
    if question.algorithm not in known:
        found, fix = (
            f"algorithm {question.algorithm!r}",
            near_misses(str(question.algorithm), known),
        )
    elif question.num_bytes < 0 or (question.row_bytes or 0) < 0:
        found = f"num_bytes={question.num_bytes}, row_bytes={question.row_bytes}"
        fix = "Give sizes in bytes, from 0 on."
    else:
        return
    raise ConfigError(
        question.operation,
        found=found,
        why="An algorithm is chosen by its name, or by the size of the message.",
        fix=fix,
    )
