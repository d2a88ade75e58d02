"""The schedule as data: what modules do in a micro-batch, and when to communicate around that.

A *trace* is the order in which units begin and end, forward and backward; the ranks compare
traces. `pcomm.fsdp.runtime.compiler` turns one into a list of steps by integers and names alone,
so that the same list is executed, printed, hashed and simulated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pcomm.fsdp.settings.reshard_policy import Keep

__all__ = [
    "NOTHING_OWED",
    "Buffer",
    "Kind",
    "Mark",
    "Owed",
    "Phase",
    "Schedule",
    "Step",
    "marks_of",
]

Phase = Literal["forward", "backward"]
Kind = Literal[
    "use", "done", "end", "gather", "wait", "release", "reduce", "finish", "replicate", "settle"
]

ANCHORS = ("use", "done", "end")
"""Kinds of steps that the model does; all others are done by us around them."""

_BLOCKING = ("wait", "finish", "settle")


class Mark(NamedTuple):
    """Something that a unit did, as the ranks compare it."""

    kind: Literal["use", "done", "end"]
    unit: str
    phase: Phase


class Step(NamedTuple):
    """One operation of a schedule.

    Attributes:
        kind: `use` and `done`: a unit's module begins and ends; `end`: the micro-batch ends;
            `gather`, `wait`, `release`: of a buffer of parameters; `reduce`, `finish`: of
            gradients, the latter adds them to the shard; `replicate`, `settle`: of their sum over
            replicas.
        name: A unit for `use`, `done` and `end`; a buffer for all others.
        phase: When.
    """

    kind: Kind
    name: str
    phase: Phase

    @property
    def is_anchor(self) -> bool:
        """Whether the model does it."""
        return self.kind in ANCHORS

    @property
    def is_blocking(self) -> bool:
        """Whether it waits for a collective."""
        return self.kind in _BLOCKING


@dataclass(frozen=True)
class Buffer:
    """What the schedule knows of one parameter group.

    Args:
        name: Unique.
        unit: The unit that uses it.
        num_bytes: Size when gathered.
        keep: See `ReshardPolicy`.
        reduces: Whether gradients are reduced in this micro-batch.
        replicates: Whether they are then summed over replicas.
        trains: Whether there are gradients at all.
        has_replicas: Whether there are replicas at all.
    """

    name: str
    unit: str
    num_bytes: int
    keep: Keep
    reduces: bool
    replicates: bool
    trains: bool = True
    has_replicas: bool = False


class Owed(NamedTuple):
    """What earlier micro-batches have left to the last one of the step, by names of buffers.

    Attributes:
        reduces: Whole gradients that were added up and are not reduced yet.
        sums: Gradients of shards that are not summed over replicas yet.
    """

    reduces: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()


NOTHING_OWED = Owed()


@dataclass(frozen=True)
class Schedule:
    """The steps of one micro-batch, in the order in which this rank takes them.

    Args:
        steps: All of them.
        gathered_at_end: Buffers that stay gathered for the next micro-batch.
        owed_at_end: What is left to a later micro-batch of the step.
    """

    steps: tuple[Step, ...]
    gathered_at_end: frozenset[str]
    owed_at_end: Owed = NOTHING_OWED

    @cached_property
    def fingerprint(self) -> str:
        """The same for equal lists of steps."""
        text = "\n".join(" ".join(step) for step in self.steps)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def count(self, kind: Kind) -> int:
        """How many steps of a kind there are."""
        return sum(step.kind == kind for step in self.steps)

    def describe(self) -> str:
        """One line for each thing that a unit does, with what is done before and after it."""
        lines = [f"schedule {self.fingerprint}"]
        before: list[str] = []
        for step in self.steps:
            if step.is_anchor:
                lines.append(
                    f"  {step.phase:<8} {step.kind:<4} {step.name:<20} {', '.join(before)}"
                )
                before = []
            else:
                before.append(f"{step.kind} {step.name}")
        lines.append(f"  after it all{' ' * 23}{', '.join(before)}" if before else "")
        return "\n".join(line.rstrip() for line in lines)


def marks_of(steps: Iterable[Step]) -> tuple[Mark, ...]:
    """What the model did, of all the steps."""
    return tuple(
        Mark(step.kind, step.name, step.phase)
        for step in steps
        if step.kind == "use" or step.kind == "done" or step.kind == "end"
    )
