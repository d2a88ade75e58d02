"""The schedule of a micro-batch as data: what to communicate around what its units do.

A *trace* is the order in which units begin and end, forward and backward; the ranks compare traces.
Here one becomes a list of steps, by integers and names alone, so that the same list is executed,
printed, hashed and simulated. For a trace that is known it is written with foresight; for one that
comes event by event, on demand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.settings import Keep

__all__ = [
    "ALL_REDUCED",
    "Kind",
    "OnDemand",
    "Operation",
    "Phase",
    "Schedule",
    "ScheduledGroup",
    "UnitEvent",
    "UnreducedGrads",
    "compile_schedule",
    "events_of",
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
"""Kinds of steps that the model does; the runtime does all others around them."""

_BLOCKING = ("wait_gather", "wait_reduce", "wait_all_reduce")


class UnitEvent(NamedTuple):
    """A unit's beginning or end, as the ranks compare it."""

    kind: Literal["use", "done", "end"]
    unit: str
    phase: Phase


class Operation(NamedTuple):
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


class UnreducedGrads(NamedTuple):
    """Gradients that earlier micro-batches have left to the last one of the step.

    Attributes:
        reduces: Names of groups with unsharded gradients that are not reduced yet.
        sums: Names of groups with gradients of shards that are not summed over replicas yet.
    """

    reduces: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()


ALL_REDUCED = UnreducedGrads()


@dataclass(frozen=True)
class Schedule:
    """The steps of one micro-batch, in the order in which this rank takes them.

    Args:
        steps: All steps.
        gathered_at_end: Names of groups that stay gathered for the next micro-batch.
        unreduced_at_end: Gradients that are left to a later micro-batch of the step.
    """

    steps: tuple[Operation, ...]
    gathered_at_end: frozenset[str]
    unreduced_at_end: UnreducedGrads = ALL_REDUCED

    @cached_property
    def fingerprint(self) -> str:
        """A hash, the same for equal lists of steps."""
        text = "\n".join(" ".join(op) for op in self.steps)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def count(self, kind: Kind) -> int:
        """Number of steps of a kind."""
        return sum(op.kind == kind for op in self.steps)

    def describe(self) -> str:
        """One line for each event, with the steps around it."""
        lines = [f"schedule {self.fingerprint}"]
        before: list[str] = []
        for op in self.steps:
            if op.is_anchor:
                lines.append(f"  {op.phase:<8} {op.kind:<4} {op.name:<20} {', '.join(before)}")
                before = []
            else:
                before.append(f"{op.kind} {op.name}")
        lines.append(f"  after it all{' ' * 23}{', '.join(before)}" if before else "")
        return "\n".join(line.rstrip() for line in lines)


def events_of(steps: Iterable[Operation]) -> tuple[UnitEvent, ...]:
    """The steps that the model did, as events."""
    return tuple(
        UnitEvent(op.kind, op.name, op.phase)
        for op in steps
        if op.kind == "use" or op.kind == "done" or op.kind == "end"
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


def compile_schedule(
    events: Sequence[UnitEvent],
    groups: Iterable[ScheduledGroup],
    *,
    prefetch: int,
    prefetch_bytes: int | None,
    inflight_reduce: int,
    gathered: frozenset[str],
    is_last: bool,
    unreduced: UnreducedGrads = ALL_REDUCED,
    taken: Sequence[Operation] = (),
    prefetch_backward: int | None = None,
) -> Schedule:
    """The schedule of one micro-batch around what its units do.

    Before a unit is used, its own groups and those of the next `prefetch` units are in flight or
    gathered. After the forward of a unit its groups are released, unless they would be gathered
    again at once. In backward the gather of the unit used next is in flight before the reduce of
    the one that has just ended, so that it does not queue behind it even on one communicator; the
    one after it follows that reduce where an older reduce has to end first. A unit that backward
    comes to several times, as after two forwards, is reduced the last time.

    Without prefetch in backward, a gather is issued when the unit before it has ended, before the
    reduce of that one: a reduce alone is then in flight while a unit computes.

    Args:
        events: Beginnings and ends of units, in order; the last one is `end`.
        groups: The parameter groups of all units.
        prefetch: Units gathered ahead.
        prefetch_bytes: Limit of bytes gathered ahead beyond the first unit; None for no limit.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        is_last: True for the last micro-batch of a step.
        unreduced: Gradients that earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already, around its first events; the
            schedule goes on behind them, and gives back what was gathered ahead for nothing.
        prefetch_backward: Units gathered ahead in backward; None for `prefetch`. As many units stay
            from forward to backward as `prefetch` says.
    """
    backward = prefetch if prefetch_backward is None else prefetch_backward
    depths: dict[Phase, int] = {"forward": prefetch, "backward": backward}
    writer = ScheduleWriter(
        events, groups, depths, prefetch_bytes, inflight_reduce, gathered, unreduced
    )
    start = writer.resume(taken)
    if taken:
        phase = events[start].phase
        writer.give_back(writer.ahead(start - 1, 1 + depths[phase]), phase)
    for place in range(start, len(events)):
        writer.add(place, events[place], is_last)
    steps = tuple(writer.steps[len(taken) :])
    return Schedule(steps, frozenset(writer.gathered), writer.unreduced)


class OnDemand:
    """Steps for events that come one by one, while nothing is known of those that follow.

    Nothing is gathered ahead. Used for what was never seen before.

    Args:
        groups: The parameter groups of all units.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        is_last: True for the last micro-batch of a step.
        unreduced: Gradients that earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already.
    """

    def __init__(
        self,
        groups: Iterable[ScheduledGroup],
        *,
        inflight_reduce: int,
        gathered: frozenset[str],
        is_last: bool,
        unreduced: UnreducedGrads = ALL_REDUCED,
        taken: Sequence[Operation] = (),
    ) -> None:
        self._is_last = is_last
        depths: dict[Phase, int] = {"forward": 0, "backward": 0}
        self._writer = ScheduleWriter(
            (), groups, depths, None, inflight_reduce, gathered, unreduced
        )
        self._writer.resume(taken)
        self._gives_back = bool(taken)

    @property
    def steps(self) -> Sequence[Operation]:
        """All steps up to now."""
        return self._writer.steps

    @property
    def events(self) -> list[UnitEvent]:
        """All events up to now."""
        return list(events_of(self.steps))

    @property
    def gathered(self) -> frozenset[str]:
        """Names of groups that are gathered now."""
        return frozenset(self._writer.gathered)

    @property
    def unreduced(self) -> UnreducedGrads:
        """Gradients that are left to a later micro-batch of the step."""
        return self._writer.unreduced

    def steps_for(self, event: UnitEvent) -> list[Operation]:
        """The steps before and after `event`, which is one of them."""
        start = len(self._writer.steps)
        if self._gives_back:
            self._gives_back = False
            self._writer.give_back([event.unit], event.phase)
        self._writer.add(0, event, self._is_last)
        return self._writer.steps[start:]


class ScheduleWriter:
    """Goes over events once and writes steps around them, from what is gathered and in flight.

    How far it gathers ahead, and how long it keeps, also bounds the places that `registered_memory`
    reserves and the memory that `report` foresees.

    Args:
        events: The events to look ahead in; empty where they are not known.
        groups: The parameter groups of all units.
        depths: Units gathered ahead, in forward and in backward.
        prefetch_bytes: Limit of bytes gathered ahead beyond the first unit; None for no limit.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        unreduced: Gradients that earlier micro-batches of the step have left.

    Attributes:
        steps: The steps so far.
        gathered: Names of groups that are gathered after them.
    """

    def __init__(
        self,
        events: Sequence[UnitEvent],
        groups: Iterable[ScheduledGroup],
        depths: Mapping[Phase, int],
        prefetch_bytes: int | None,
        inflight_reduce: int,
        gathered: frozenset[str],
        unreduced: UnreducedGrads,
    ) -> None:
        self.steps: list[Operation] = []
        self.gathered = set(gathered)
        self._events = events
        self._to_reduce, self._to_sum = set(unreduced.reduces), set(unreduced.sums)
        self._last_backward = {
            event.unit: place
            for place, event in enumerate(events)
            if (event.kind, event.phase) == ("use", "backward")
        }
        self._depths, self._limit = depths, prefetch_bytes
        self._inflight = inflight_reduce
        self._groups = {group.name: group for group in groups}
        self._of_unit: dict[str, list[ScheduledGroup]] = {}
        for group in self._groups.values():
            self._of_unit.setdefault(group.unit, []).append(group)
        self._waiting: set[str] = set()
        self._open: list[str] = []
        self._reducing: list[ScheduledGroup] = []
        self._all_reducing: list[ScheduledGroup] = []

    @property
    def unreduced(self) -> UnreducedGrads:
        """Gradients that are left to a later micro-batch of the step."""
        return UnreducedGrads(frozenset(self._to_reduce), frozenset(self._to_sum))

    def resume(self, taken: Sequence[Operation]) -> int:
        """Go on behind steps that were taken. Returns the number of events among them."""
        for op in taken:
            if op.kind == "use":
                self._open.append(op.name)
            elif op.kind == "done":
                self._close(op.name)
                if op.phase == "backward":
                    self._leave_to_reduce(op.name)
            elif op.kind == "gather":
                self.gathered.add(op.name)
                self._waiting.add(op.name)
            elif op.kind == "wait_gather":
                self._waiting.remove(op.name)
            elif op.kind == "release":
                self.gathered.remove(op.name)
            elif op.kind == "reduce":
                self._to_reduce.discard(op.name)
                self._reducing.append(self._groups[op.name])
            elif op.kind == "wait_reduce":
                self._reducing.remove(self._groups[op.name])
                self._leave_to_sum(self._groups[op.name])
            elif op.kind == "all_reduce":
                self._to_sum.discard(op.name)
                self._all_reducing.append(self._groups[op.name])
            elif op.kind == "wait_all_reduce":
                self._all_reducing.remove(self._groups[op.name])
        self.steps.extend(taken)
        return sum(op.is_anchor for op in taken)

    def give_back(self, units: Sequence[str], phase: Phase) -> None:
        """Release groups that were gathered ahead and are not used soon."""
        for group in self._groups.values():
            is_used = group.unit in units or group.unit in self._open
            if group.keep == "use" and not is_used:
                self._release(group, phase)

    def add(self, place: int, event: UnitEvent, is_last: bool) -> None:
        """Write one event and the steps around it.

        Args:
            place: Index of the event in `events`.
            event: The event.
            is_last: True for the last micro-batch of a step.
        """
        if event.kind == "use":
            self._use(place, event)
        elif event.kind == "done":
            self._done(place, event, is_last)
        else:
            self._end(event, is_last)

    def _use(self, place: int, event: UnitEvent) -> None:
        self._gather(event.unit, event.phase)
        self._open.append(event.unit)
        for unit in self.ahead(place, self._depths[event.phase]):
            self._gather(unit, event.phase)
        for group in self._of_unit.get(event.unit, ()):
            if group.name in self._waiting:
                self._waiting.remove(group.name)
                self.steps.append(Operation("wait_gather", group.name, event.phase))
        self.steps.append(Operation("use", event.unit, event.phase))

    def _done(self, place: int, event: UnitEvent, is_last: bool) -> None:
        self.steps.append(Operation("done", event.unit, event.phase))
        self._close(event.unit)
        ahead = self.ahead(place, 1 + self._depths[event.phase])
        if event.unit not in ahead and event.unit not in self._open:
            for group in self._of_unit.get(event.unit, ()):
                if _is_over(group.keep, event.phase, is_last):
                    self._release(group, event.phase)
        if event.phase == "backward":
            self._leave_to_reduce(event.unit)
            reduced = [group for group in self._of_unit.get(event.unit, ()) if group.reduces]
            if self._last_backward.get(event.unit, place) > place:
                reduced = []
            # Where an older reduce has to end before the next unit computes, what is needed after
            # that unit is gathered behind it: as early as it can be of use, and in memory that the
            # older one has given back.
            units = {group.unit for group in [*self._reducing, *reduced]}
            has_to_wait = len(units) > self._inflight
            for unit in ahead[:1] if has_to_wait else ahead:
                self._gather(unit, event.phase)
            self._reduce(reduced)

    def _end(self, event: UnitEvent, is_last: bool) -> None:
        self.steps.append(Operation("end", event.unit, event.phase))
        if event.phase == "backward":
            # Of units that took part in an earlier micro-batch of the step, and not in this one.
            unreduced = [group for name, group in self._groups.items() if name in self._to_reduce]
            self._reduce([group for group in unreduced if group.reduces])
            while self._reducing:
                self._wait_reduce(self._reducing.pop(0))
            for name, group in self._groups.items():
                if name in self._to_sum and group.all_reduces:
                    self._all_reduce(group)
            while self._all_reducing:
                self._wait_all_reduce(self._all_reducing[0])
        for own in self._of_unit.values():
            for group in own:
                # A forward without backward keeps the memory of what the next step gathers again.
                if group.keep in ("use", "backward") or _is_over(group.keep, event.phase, is_last):
                    self._release(group, event.phase)
                elif group.name in self._waiting:
                    # Gathered ahead for a use that did not come, and kept: the next use takes it
                    # for gathered.
                    self._waiting.remove(group.name)
                    self.steps.append(Operation("wait_gather", group.name, event.phase))
                if is_last:
                    # The optimizer makes it stale; its memory stays where it is.
                    self.gathered.discard(group.name)

    def ahead(self, place: int, count: int) -> list[str]:
        """The next units that are used after an event and are not in use there, nearest first."""
        units: list[str] = []
        total = 0
        for event in self._events[place + 1 :]:
            if len(units) == count:
                break
            if event.kind != "use" or event.unit in units or event.unit in self._open:
                continue
            total += sum(group.num_bytes for group in self._of_unit.get(event.unit, ()))
            if units and self._limit is not None and total > self._limit:
                break
            units.append(event.unit)
        return units

    def _gather(self, unit: str, phase: Phase) -> None:
        for group in self._of_unit.get(unit, ()):
            if group.name not in self.gathered:
                self.gathered.add(group.name)
                self._waiting.add(group.name)
                self.steps.append(Operation("gather", group.name, phase))

    def _release(self, group: ScheduledGroup, phase: Phase) -> None:
        if group.name not in self.gathered:
            return
        if group.name in self._waiting:
            # Gathered ahead for a use that did not come.
            self._waiting.remove(group.name)
            self.steps.append(Operation("wait_gather", group.name, phase))
        self.gathered.remove(group.name)
        self.steps.append(Operation("release", group.name, phase))

    def _reduce(self, groups: Sequence[ScheduledGroup]) -> None:
        # Issued before older ones are waited for, so that the queue never runs dry.
        for group in groups:
            if group in self._reducing:
                self._reducing.remove(group)
                self._wait_reduce(group)
            self._reducing.append(group)
            self._to_reduce.discard(group.name)
            self.steps.append(Operation("reduce", group.name, "backward"))
        while len({reducing.unit for reducing in self._reducing}) > self._inflight:
            self._wait_reduce(self._reducing.pop(0))

    def _wait_reduce(self, group: ScheduledGroup) -> None:
        if group in self._all_reducing:
            # What is added to the sum now would be lost or doubled.
            self._wait_all_reduce(group)
        self.steps.append(Operation("wait_reduce", group.name, "backward"))
        self._leave_to_sum(group)
        if group.all_reduces:
            self._all_reduce(group)

    def _all_reduce(self, group: ScheduledGroup) -> None:
        self._to_sum.discard(group.name)
        self._all_reducing.append(group)
        self.steps.append(Operation("all_reduce", group.name, "backward"))

    def _wait_all_reduce(self, group: ScheduledGroup) -> None:
        self._all_reducing.remove(group)
        self.steps.append(Operation("wait_all_reduce", group.name, "backward"))

    def _leave_to_reduce(self, unit: str) -> None:
        self._to_reduce.update(group.name for group in self._of_unit.get(unit, ()) if group.trains)

    def _leave_to_sum(self, group: ScheduledGroup) -> None:
        if group.has_replicas:
            self._to_sum.add(group.name)

    def _close(self, unit: str) -> None:
        # A trace that was put together of two may end what it has not begun.
        if unit in self._open:
            self._open.remove(unit)


def _is_over(keep: Keep, phase: Phase, is_last: bool) -> bool:
    """True if a group may be released when its unit has ended."""
    if phase == "forward":
        return keep == "use"
    return keep in ("use", "backward") or (keep == "step" and is_last)
