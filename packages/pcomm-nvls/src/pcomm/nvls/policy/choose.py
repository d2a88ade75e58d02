"""The choice of an algorithm: a pure function, so that all ranks choose alike without talking.

From facts about a group and a question about a call to an algorithm with its launch and its
reasons. A `Chooser` keeps the choices of one workspace, logs what is lost, and explains.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.nvls.policy.table import ALGORITHMS, Algorithm, Table, Threshold, operation_named
from pcomm.nvls.primitives.lamport_numbers import sent_bytes

if TYPE_CHECKING:
    import torch


__all__ = [
    "Choice",
    "Chooser",
    "CollectiveRequest",
    "GroupInfo",
    "choose",
    "is_one_shot",
    "unsupported_reason",
]


@dataclass(frozen=True)
class GroupInfo:
    """Facts about a group and its workspace, the same on all ranks.

    Args:
        architecture: Architecture of every device, such as `sm_90`; `emulated` for the Triton
            interpreter.
        world_size: Number of ranks of the group.
        multicast: True if every rank has a multicast address.
        peers: True if every rank has pointers to the memory of all others.
        slot_bytes: Size of one slot of the workspace, in bytes.
        multicast_reason: Reason that the vote gave if there is no multicast address.
        peers_reason: Reason that the vote gave if there are no pointers.
        lamport_bytes: Room for what one rank sends to another without a barrier, in bytes.
    """

    architecture: str
    world_size: int
    multicast: bool
    peers: bool
    slot_bytes: int
    multicast_reason: str = ""
    peers_reason: str = ""
    lamport_bytes: int = 0

    def agreed_lines(self, table: Table) -> list[str]:
        """Lines of text that are equal on all ranks if they choose alike; for `Control.agree`.

        Reasons are left out: no choice depends on them.

        Args:
            table: Table that this rank chooses from.
        """
        return [
            f"architecture {self.architecture}",
            f"world size {self.world_size}",
            f"multicast {self.multicast}",
            f"peers {self.peers}",
            f"slot bytes {self.slot_bytes}",
            f"lamport bytes {self.lamport_bytes}",
            *table.lines(self.architecture, self.world_size),
        ]


class CollectiveRequest(NamedTuple):
    """The question of a choice: a call, equal on all ranks. Also the key of cached choices.

    Attributes:
        operation: Name of an operation, one of `OPERATIONS`.
        num_bytes: Size of the message in bytes, as the operation defines it; 0 is allowed.
        dtype: Data type of the tensors.
        dim: Dimension along which tensors are joined or split: 0, or -1 for the last one.
        row_bytes: Size of the shortest range that stays contiguous, in bytes, such as a row of an
            input that is gathered along the last dimension, of a normalisation or of a variable
            count; None for the whole message.
        deterministic: True for sums in fp32 and in the order of the ranks.
        algorithm: Algorithm that the caller names, or `auto`.
    """

    operation: str
    num_bytes: int
    dtype: torch.dtype
    dim: int = 0
    row_bytes: int | None = None
    deterministic: bool = False
    algorithm: Algorithm | Literal["auto"] = "auto"


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


def unsupported_reason(
    facts: GroupInfo, question: CollectiveRequest, algorithm: Algorithm
) -> Reason | None:
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


def _no_memory(facts: GroupInfo, algorithm: Algorithm) -> str | None:
    if algorithm == "multimem":
        there, what, reason = facts.multicast, "no multicast address", facts.multicast_reason
    else:
        there, what, reason = facts.peers, "no pointers to peers", facts.peers_reason
    if there:
        return None
    return f"the group has {what} ({reason})" if reason else f"the group has {what}"


def _in_the_call(facts: GroupInfo, question: CollectiveRequest, algorithm: Algorithm) -> str | None:
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


@dataclass(frozen=True)
class Choice:
    """An algorithm with its launch and its reasons.

    Attributes:
        algorithm: Algorithm to run; `dist` is the reference, made of collectives of the group. For
            a deterministic question that has to add in the order of the ranks, too. One step or two
            of an all-reduce is `is_one_shot`'s.
        num_blocks: Number of CTAs; 0 for `dist`.
        num_warps: Number of warps of each CTA; 0 for `dist`.
        because: Phrase that says why it was chosen.
        reasons: Reasons against the algorithms that come before it, `ALGORITHM: REASON` each.
        losses: Reasons that another machine, workspace or shape would not have.
    """

    algorithm: Algorithm
    num_blocks: int
    num_warps: int
    because: str
    reasons: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


def choose(facts: GroupInfo, question: CollectiveRequest, table: Table) -> Choice:
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


def _fastest(facts: GroupInfo, question: CollectiveRequest, rows: Sequence[Threshold]) -> Choice:
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
            against[algorithm] = unsupported_reason(facts, question, algorithm) or missing
    against.pop("dist", None)
    return _choice(None, "no other algorithm is left", against)


def _against_row(facts: GroupInfo, question: CollectiveRequest, row: Threshold) -> Reason | None:
    if row.algorithm == "multimem" and facts.world_size == 2:
        return Reason("between 2 ranks it moves more bytes than pointers to peers do")
    reason = unsupported_reason(facts, question, row.algorithm)
    if question.num_bytes <= row.max_bytes or (reason is not None and not reason.is_loss):
        return reason
    # A loss would be none here: the table would not have taken the algorithm at this size.
    return Reason(f"it is preferred up to {row.max_bytes} bytes")


def _named(
    facts: GroupInfo, question: CollectiveRequest, rows: Sequence[Threshold], algorithm: Algorithm
) -> Choice:
    named = "it was asked for by name"
    if algorithm == "dist":
        return _choice(None, named, {})
    own = [row for row in rows if row.algorithm == algorithm]
    reason = unsupported_reason(facts, question, algorithm)
    if reason is None and not own:
        reason = Reason(_no_row(facts, question), is_loss=True)
    if reason is not None:
        return _choice(None, f"{algorithm} cannot run", {algorithm: reason})
    # Beyond its last threshold it keeps the launch of the largest messages.
    return _choice(
        next((row for row in own if question.num_bytes <= row.max_bytes), own[-1]), named, {}
    )


def _choice(row: Threshold | None, because: str, against: Mapping[Algorithm, Reason]) -> Choice:
    reasons = tuple(f"{algorithm}: {reason.text}" for algorithm, reason in against.items())
    losses = tuple(f"{algorithm}: {r.text}" for algorithm, r in against.items() if r.is_loss)
    if row is None:
        return Choice("dist", 0, 0, because, reasons, losses)
    return Choice(row.algorithm, row.num_blocks, row.num_warps, because, reasons, losses)


def _no_row(facts: GroupInfo, question: CollectiveRequest) -> str:
    where = f"{question.operation} between {facts.world_size} ranks of {facts.architecture}"
    return f"the table has no row of it for {where}"


def _check(question: CollectiveRequest) -> None:
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


# Messages of all sizes, as variable counts may have, do not fill the memory.
_MOST_CHOICES = 4096


# Bytes that a link moves while a barrier takes place: 2 us at 371 and at 722 GB/s. A model, not
# measured. Under the interpreter it is small, so that tests reach both sides.
_BARRIER_BYTES = {"sm_90": 740_000, "emulated": 1024}
_BARRIER_BYTES_LATER = 1_440_000


def is_one_shot(num_bytes: int, world_size: int, way: str, architecture: str) -> bool:
    """Whether each rank sums the whole tensor, with one barrier, or its range, with two.

    One step moves more bytes. It is taken where these cost less than the second barrier.

    Args:
        num_bytes: Size of the tensor, in bytes.
        world_size: Number of ranks.
        way: "multicast" or "peers".
        architecture: Architecture of the devices, such as `sm_90`.
    """
    n = world_size
    if way == "multicast":
        # Each rank sends its tensor to n readers, or a range of it to each and the sums to all.
        one, two = n * n, n + 1
    else:
        one, two = n * (n - 1), 2 * (n - 1)
    limit = _BARRIER_BYTES.get(architecture, _BARRIER_BYTES_LATER)
    return (one - two) * num_bytes <= n * limit


class Chooser:
    """Chooses for the calls on one workspace, and logs each reason once.

    The logger is `pcomm.nvls`. A reason is logged as a warning if speed is lost that another
    machine, workspace or shape would have, and for information otherwise.

    Args:
        facts: Facts about the group and its workspace; ranks compare `facts.agreed_lines(table)`
            when the workspace is opened.
        table: Thresholds and launches; by default the table of the package.
        warns: True to log what is lost as a warning: on one rank, since all choose alike.
    """

    def __init__(self, facts: GroupInfo, table: Table | None = None, *, warns: bool = True) -> None:
        self.facts, self.table = facts, Table() if table is None else table
        self._choices: dict[CollectiveRequest, Choice] = {}
        self._logged: set[str] = set()
        self._warns = warns
        self._log = logging.getLogger("pcomm.nvls")

    def choose(self, question: CollectiveRequest, *, strict: bool = False) -> Choice:
        """The choice for a call. Local; less than a microsecond from the second time on.

        Args:
            question: Call that an algorithm is chosen for.
            strict: True if `dist` is an error, unless the question names it.

        Raises:
            ConfigError: An unknown operation or algorithm, or a negative size.
            UnsupportedError: The algorithm that the question names cannot run, or `strict` and the
                choice is `dist`. On every rank, since all choose alike; never with one rank.
        """
        choice = self._choices.get(question)
        if choice is None:
            choice = self._decide(question)
        if choice.algorithm == "dist":
            self._check(question, choice, strict)
        return choice

    def explain(self, question: CollectiveRequest) -> str:
        """Text that says which algorithm runs for a call, why, and why not each faster one.

        Raises:
            ConfigError: An unknown operation or algorithm, or a negative size.
        """
        choice = choose(self.facts, question, self.table)
        launch = f", {choice.num_blocks} blocks of {choice.num_warps} warps"
        head = f"{_described(self.facts, question)}: {choice.algorithm}"
        lines = [head + (launch if choice.num_blocks else "")]
        lines.append(f"  {choice.algorithm}: {choice.because}")
        return "\n".join([*lines, *(f"  not {reason}" for reason in choice.reasons)])

    def _decide(self, question: CollectiveRequest) -> Choice:
        choice = choose(self.facts, question, self.table)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        self._choices[question] = choice
        for reason in choice.reasons:
            if reason not in self._logged:
                self._logged.add(reason)
                is_warning = self._warns and reason in choice.losses
                level = logging.WARNING if is_warning else logging.INFO
                first = f"{question.operation} takes {choice.algorithm}"
                self._log.log(level, "not %s (first seen where %s)", reason, first)
        return choice

    def _check(self, question: CollectiveRequest, choice: Choice, strict: bool) -> None:
        if self.facts.world_size == 1:
            return
        named = question.algorithm not in ("auto", "dist")
        if not named and not (strict and question.algorithm == "auto"):
            return
        wanted = f"algo={question.algorithm!r}"
        reasons = choice.reasons or (f"dist: {choice.because}",)
        if not named:
            # A size of the table may hide that no other table would help, such as a small slot.
            found = ((n, unsupported_reason(self.facts, question, n)) for n in ALGORITHMS)
            more = (f"{name}: {reason.text}" for name, reason in found if reason is not None)
            wanted, reasons = "strict=True", tuple(dict.fromkeys([*reasons, *more]))
        raise UnsupportedError(
            f"{_described(self.facts, question)}, {wanted}",
            found="; ".join(reasons),
            why="All ranks would take torch.distributed, and the call forbids that.",
            fix="Resolve these reasons, or ask for algo='auto' without strict.",
        )


def _described(facts: GroupInfo, question: CollectiveRequest) -> str:
    """A question and the group that it is asked for, in one line."""
    message = operation_named(question.operation).message
    dtype = str(question.dtype).removeprefix("torch.")
    sums = ", deterministic" if question.deterministic else ""
    dim = f", dimension {question.dim}" if question.dim else ""
    return (
        f"{question.operation} of {question.num_bytes} bytes ({message}) of {dtype}{dim}{sums} on "
        f"{facts.world_size} ranks of {facts.architecture}"
    )
