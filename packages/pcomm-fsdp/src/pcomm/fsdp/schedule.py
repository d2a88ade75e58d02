"""The schedule as data: what modules did in the first step, and when to communicate around that.

A *trace* is the order in which units begin and end, forward and backward; the ranks compare
traces. `compile_schedule` turns one into a list of steps by integers and names alone, so that the
same list is executed, printed, hashed and simulated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pcomm.fsdp.strategy import Keep

__all__ = ["Buffer", "Kind", "Mark", "OnDemand", "Phase", "Schedule", "Step", "compile_schedule"]

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
        keep: See `Shard`.
        reduces: Whether gradients are reduced in this micro-batch.
        replicates: Whether they are then summed over replicas.
    """

    name: str
    unit: str
    num_bytes: int
    keep: Keep
    reduces: bool
    replicates: bool


@dataclass(frozen=True)
class Schedule:
    """The steps of one micro-batch, in the order in which this rank takes them.

    Args:
        steps: All of them.
        gathered_at_end: Buffers that stay gathered for the next micro-batch.
    """

    steps: tuple[Step, ...]
    gathered_at_end: frozenset[str]

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


def compile_schedule(
    marks: Sequence[Mark],
    buffers: Iterable[Buffer],
    *,
    prefetch: int,
    prefetch_bytes: int | None,
    inflight_reduce: int,
    gathered: frozenset[str],
    is_last: bool,
    prefetch_backward: int | None = None,
) -> Schedule:
    """The schedule of one micro-batch around what its units do.

    Before a unit is used, its own buffers and those of the next `prefetch` units are on their way.
    After the forward of a unit its buffers are released, unless they would be gathered again at
    once. In backward the next gather is issued before the reduce of the unit that has just ended,
    so that it does not queue behind it even on one communicator.

    Without prefetch in backward, a gather is issued when the unit before it has ended, before the
    reduce of that one: what is on its way while a unit computes is then a reduce alone.

    Args:
        marks: What units do, in order; the last one is `end`.
        buffers: Of all units.
        prefetch: Units gathered ahead.
        prefetch_bytes: Limit of what is gathered ahead beyond the first unit; None for none.
        inflight_reduce: Units whose reduces may be on their way while the next one computes.
        gathered: Names of buffers that are gathered already.
        is_last: Whether this is the last micro-batch of its step.
        prefetch_backward: The same as `prefetch` in backward, where it differs. As many units stay
            from forward to backward as `prefetch` says.
    """
    backward = prefetch if prefetch_backward is None else prefetch_backward
    depths: dict[Phase, int] = {"forward": prefetch, "backward": backward}
    compiler = _Compiler(marks, buffers, depths, prefetch_bytes, inflight_reduce, gathered)
    for place, mark in enumerate(marks):
        compiler.add(place, mark, is_last)
    return Schedule(tuple(compiler.steps), frozenset(compiler.gathered))


class OnDemand:
    """Steps for marks that come one by one, while nothing is known of those that follow.

    Nothing is gathered ahead. Used for the first step, in which the marks are recorded.

    Args:
        buffers: Of all units.
        inflight_reduce: As in `compile_schedule`.
        gathered: Names of buffers that are gathered already.
        is_last: Whether this is the last micro-batch of its step.
    """

    def __init__(
        self,
        buffers: Iterable[Buffer],
        *,
        inflight_reduce: int,
        gathered: frozenset[str],
        is_last: bool,
    ) -> None:
        self.marks: list[Mark] = []
        self._is_last = is_last
        self._compiler = _Compiler(
            (), buffers, {"forward": 0, "backward": 0}, None, inflight_reduce, gathered
        )

    @property
    def gathered(self) -> frozenset[str]:
        """Names of buffers that are gathered now."""
        return frozenset(self._compiler.gathered)

    def steps_for(self, mark: Mark) -> list[Step]:
        """What to do before and after `mark`, which is one of the steps."""
        start = len(self._compiler.steps)
        self._compiler.add(len(self.marks), mark, self._is_last)
        self.marks.append(mark)
        return self._compiler.steps[start:]


class _Compiler:
    """Goes over marks once and keeps what is gathered and what is on its way."""

    def __init__(
        self,
        marks: Sequence[Mark],
        buffers: Iterable[Buffer],
        depths: Mapping[Phase, int],
        prefetch_bytes: int | None,
        inflight_reduce: int,
        gathered: frozenset[str],
    ) -> None:
        self.steps: list[Step] = []
        self.gathered = set(gathered)
        self._marks = marks
        self._depths, self._limit = depths, prefetch_bytes
        self._inflight = inflight_reduce
        self._of_unit: dict[str, list[Buffer]] = {}
        for buffer in buffers:
            self._of_unit.setdefault(buffer.unit, []).append(buffer)
        self._waiting: set[str] = set()
        self._open: list[str] = []
        self._reducing: list[Buffer] = []
        self._replicating: list[Buffer] = []

    def add(self, place: int, mark: Mark, is_last: bool) -> None:
        if mark.kind == "use":
            self._use(place, mark)
        elif mark.kind == "done":
            self._done(place, mark, is_last)
        else:
            self._end(mark, is_last)

    def _use(self, place: int, mark: Mark) -> None:
        self._gather(mark.unit, mark.phase)
        self._open.append(mark.unit)
        for unit in self._ahead(place, self._depths[mark.phase]):
            self._gather(unit, mark.phase)
        for buffer in self._of_unit.get(mark.unit, ()):
            if buffer.name in self._waiting:
                self._waiting.remove(buffer.name)
                self.steps.append(Step("wait", buffer.name, mark.phase))
        self.steps.append(Step("use", mark.unit, mark.phase))

    def _done(self, place: int, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("done", mark.unit, mark.phase))
        self._open.remove(mark.unit)
        ahead = self._ahead(place, 1 + self._depths[mark.phase])
        if mark.unit not in ahead and mark.unit not in self._open:
            for buffer in self._of_unit.get(mark.unit, ()):
                if _is_over(buffer.keep, mark.phase, is_last):
                    self._release(buffer, mark.phase)
        if mark.phase == "backward":
            reduced = [buffer for buffer in self._of_unit.get(mark.unit, ()) if buffer.reduces]
            # Where an older reduce has to end before the next unit computes, what is needed after
            # that unit is gathered behind it: as early as it can be of use, and in memory that the
            # older one has given back.
            units = {buffer.unit for buffer in [*self._reducing, *reduced]}
            has_to_wait = len(units) > self._inflight
            for unit in ahead[:1] if has_to_wait else ahead:
                self._gather(unit, mark.phase)
            self._reduce(reduced)

    def _end(self, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("end", mark.unit, mark.phase))
        while self._reducing:
            self._finish(self._reducing.pop(0))
        for buffer in self._replicating:
            self.steps.append(Step("settle", buffer.name, "backward"))
        for own in self._of_unit.values():
            for buffer in own:
                # A forward without backward keeps what the next step would gather again.
                if buffer.keep in ("use", "backward") or _is_over(buffer.keep, mark.phase, is_last):
                    self._release(buffer, mark.phase)
                if is_last:
                    # The optimizer makes it stale; its memory stays where it is.
                    self.gathered.discard(buffer.name)

    def _ahead(self, place: int, count: int) -> list[str]:
        """The next units that are used after a mark and are not in use there, nearest first."""
        units: list[str] = []
        total = 0
        for mark in self._marks[place + 1 :]:
            if len(units) == count:
                break
            if mark.kind != "use" or mark.unit in units or mark.unit in self._open:
                continue
            total += sum(buffer.num_bytes for buffer in self._of_unit.get(mark.unit, ()))
            if units and self._limit is not None and total > self._limit:
                break
            units.append(mark.unit)
        return units

    def _gather(self, unit: str, phase: Phase) -> None:
        for buffer in self._of_unit.get(unit, ()):
            if buffer.name not in self.gathered:
                self.gathered.add(buffer.name)
                self._waiting.add(buffer.name)
                self.steps.append(Step("gather", buffer.name, phase))

    def _release(self, buffer: Buffer, phase: Phase) -> None:
        if buffer.name in self.gathered:
            self.gathered.remove(buffer.name)
            self.steps.append(Step("release", buffer.name, phase))

    def _reduce(self, buffers: Sequence[Buffer]) -> None:
        # Issued before older ones are waited for, so that the queue never runs dry.
        for buffer in buffers:
            self._reducing.append(buffer)
            self.steps.append(Step("reduce", buffer.name, "backward"))
        while len({reducing.unit for reducing in self._reducing}) > self._inflight:
            self._finish(self._reducing.pop(0))

    def _finish(self, buffer: Buffer) -> None:
        self.steps.append(Step("finish", buffer.name, "backward"))
        if buffer.replicates:
            self._replicating.append(buffer)
            self.steps.append(Step("replicate", buffer.name, "backward"))


def _is_over(keep: Keep, phase: Phase, is_last: bool) -> bool:
    """Whether a buffer may go when its unit has ended."""
    if phase == "forward":
        return keep == "use"
    return keep in ("use", "backward") or (keep == "step" and is_last)
