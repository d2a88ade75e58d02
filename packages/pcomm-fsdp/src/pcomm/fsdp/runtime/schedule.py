"""The schedule as data: the marks of a micro-batch, and the communication around them.

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

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.settings.reshard_policy import Keep

__all__ = [
    "NOTHING_OWED",
    "Kind",
    "Mark",
    "Owed",
    "Phase",
    "Schedule",
    "ScheduledGroup",
    "Step",
    "marks_of",
    "scheduled_group",
]

Phase = Literal["forward", "backward"]
Kind = Literal[
    "use",
    "done",
    "end",
    "gather",
    "wait_gather",
    "release",
    "reduce",
    "wait_reduce",
    "all_reduce",
    "wait_all_reduce",
]

ANCHORS = ("use", "done", "end")
"""Kinds of steps that the model does; the engine does all others around them."""

_BLOCKING = ("wait_gather", "wait_reduce", "wait_all_reduce")


class Mark(NamedTuple):
    """A unit's beginning or end, as the ranks compare it."""

    kind: Literal["use", "done", "end"]
    unit: str
    phase: Phase


class Step(NamedTuple):
    """One operation of a schedule.

    Attributes:
        kind: `use`, `done`: a unit's module begins and ends; `end`: the micro-batch ends; `gather`,
            `wait_gather`, `release`: of parameters; `reduce`, `wait_reduce`: of gradients, which
            are then added to those of the shard; `all_reduce`, `wait_all_reduce`: of gradients of
            the shard, over replicas.
        name: A unit for `use`, `done` and `end`; a parameter group for all others.
        phase: Forward or backward.
    """

    kind: Kind
    name: str
    phase: Phase

    @property
    def is_anchor(self) -> bool:
        """True if the model does it."""
        return self.kind in ANCHORS

    @property
    def is_blocking(self) -> bool:
        """True if it waits for a collective."""
        return self.kind in _BLOCKING


@dataclass(frozen=True)
class ScheduledGroup:
    """The facts of one parameter group that a schedule depends on.

    Args:
        name: Unique.
        unit: The unit that uses it.
        num_bytes: Bytes of its unsharded parameters.
        keep: Time until which they stay gathered, as in `ReshardPolicy`.
        reduces: True if gradients are reduced in this micro-batch.
        all_reduces: True if they are then summed over replicas.
        trains: True if there are gradients at all.
        has_replicas: True if there are replicas at all.
    """

    name: str
    unit: str
    num_bytes: int
    keep: Keep
    reduces: bool
    all_reduces: bool
    trains: bool = True
    has_replicas: bool = False


class Owed(NamedTuple):
    """Gradients that earlier micro-batches have left to the last one of the step.

    Attributes:
        reduces: Names of groups with unsharded gradients that are not reduced yet.
        sums: Names of groups with gradients of shards that are not summed over replicas yet.
    """

    reduces: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()


NOTHING_OWED = Owed()


@dataclass(frozen=True)
class Schedule:
    """The steps of one micro-batch, in the order in which this rank takes them.

    Args:
        steps: All steps.
        gathered_at_end: Names of groups that stay gathered for the next micro-batch.
        owed_at_end: Gradients that are left to a later micro-batch of the step.
    """

    steps: tuple[Step, ...]
    gathered_at_end: frozenset[str]
    owed_at_end: Owed = NOTHING_OWED

    @cached_property
    def fingerprint(self) -> str:
        """A hash, the same for equal lists of steps."""
        text = "\n".join(" ".join(step) for step in self.steps)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def count(self, kind: Kind) -> int:
        """Number of steps of a kind."""
        return sum(step.kind == kind for step in self.steps)

    def describe(self) -> str:
        """One line for each mark, with the steps around it."""
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
    """The steps that the model did, as marks."""
    return tuple(
        Mark(step.kind, step.name, step.phase)
        for step in steps
        if step.kind == "use" or step.kind == "done" or step.kind == "end"
    )


def scheduled_group(plan: GroupPlan, *, is_last: bool) -> ScheduledGroup:
    """The facts of a parameter group that the schedule of a micro-batch depends on. Local.

    Args:
        plan: The plan of the group.
        is_last: True for the last micro-batch of a step.
    """
    reduces = plan.is_trainable and (is_last or plan.reshard.reduce == "micro_batch")
    has_replicas = plan.is_trainable and plan.num_replicas > 1
    return ScheduledGroup(
        plan.name,
        plan.unit,
        plan.gathered_bytes,
        plan.reshard.keep,
        reduces,
        reduces and is_last and has_replicas,
        trains=plan.is_trainable,
        has_replicas=has_replicas,
    )
