"""Which schedule a micro-batch follows: that of an earlier one, until the two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.peers import ScheduleAgreement
from pcomm.fsdp.runtime.schedule import (
    ALL_REDUCED,
    OnDemand,
    Operation,
    Schedule,
    ScheduledGroup,
    UnitEvent,
    UnreducedGrads,
    compile_schedule,
    events_of,
    scheduled_group,
)
from pcomm.fsdp.settings import CommPolicy

__all__ = ["MOST_TRACES", "ScheduleExecutor", "UnitTraces"]


class ScheduleExecutor:
    """Answers each event of a micro-batch with steps, from the schedule of the trace it follows.

    A micro-batch of a kind that was never seen is answered on demand, and its events are kept as a
    trace. One that departs from the trace that was guessed goes on with another one that fits, or
    on demand; the ranks agree on that first, so that none of them is alone with it. On demand only
    what is used is compared, and only with `checks_first_step`.

    Args:
        plans: Plans of all groups that communicate or convert.
        policy: Depths; `checks_first_step` has ranks agree before each gather on demand.
        agreement: Agreements between the ranks.
    """

    def __init__(
        self, plans: Sequence[GroupPlan], policy: CommPolicy, agreement: ScheduleAgreement
    ) -> None:
        self._plans, self._policy, self._agreement = plans, policy, agreement
        self._traces = UnitTraces()
        self._schedules: WeakKeyDictionary[UnitTrace, dict[object, Schedule]] = WeakKeyDictionary()
        self._gathered: frozenset[str] = frozenset()
        self._unreduced = ALL_REDUCED
        self._place = 0
        self._context, self._is_last = "", True
        # One of the two answers; `_events` are those of the schedule.
        self._on_demand: OnDemand | None = None
        self._schedule: Schedule | None = None
        self._events: Sequence[UnitEvent] = ()
        self._next = 0
        self._taken: tuple[Operation, ...] = ()

    def begin(self, context: str, *, is_last: bool) -> None:
        """A micro-batch begins, of which no more is known than this. Local."""
        self._context, self._is_last = context, is_last
        self._taken, self._next = (), 0
        self._on_demand = self._schedule = None
        trace = self._traces.guess(context)
        if trace is None:
            self._on_demand = self._make_on_demand(())
        else:
            self._events = trace.events
            self._schedule = self.schedule(trace, is_last=is_last)

    def set_last(self, is_last: bool) -> None:
        """Say anew, when its backward begins, if it is the last one of its step. Local."""
        if is_last != self._is_last:
            self._is_last = is_last
            self._plan_again(self._steps_taken(), None if self._on_demand else self._events)

    def steps_for(self, event: UnitEvent) -> Sequence[Operation]:
        """The steps before and after `event`, which is one of them.

        Collective where it was not foreseen.
        """
        self._place += 1
        if self._on_demand is not None:
            if event.kind == "use" and self._policy.checks_first_step:
                self._agreement.agree(self._place, " ".join(event))
            return self._on_demand.steps_for(event)
        assert self._schedule is not None
        steps, place = self._schedule.steps, self._next
        while place < len(steps) and not steps[place].is_anchor:
            place += 1
        expected = steps[place] if place < len(steps) else None
        if expected != (event.kind, event.unit, event.phase):
            return self._depart(event, expected)
        place += 1
        # What blocks is left to the moment where its result is needed.
        while place < len(steps) and not steps[place].is_anchor:
            if steps[place].is_blocking and event.kind != "end":
                break
            place += 1
        taken, self._next = steps[self._next : place], place
        return taken

    def end(self) -> None:
        """The micro-batch has ended, and its steps are done. Collective if it was on demand."""
        if self._on_demand is not None:
            self._events = tuple(self._on_demand.events)
            lines = [" ".join(event) for event in self._events]
            self._agreement.agree(self._place, "\n".join(lines))
            self._gathered, self._unreduced = self._on_demand.gathered, self._on_demand.unreduced
        else:
            assert self._schedule is not None
            self._gathered = self._schedule.gathered_at_end
            self._unreduced = self._schedule.unreduced_at_end
        self._traces.learn(self._context, self._events)
        self._on_demand = self._schedule = None

    def check_peers(self) -> None:
        """Raise if a rank has departed from what this one has done since. Local."""
        self._agreement.check(self._place)

    def give_up(self) -> None:
        """The micro-batch will not end. Local."""
        self._on_demand = self._schedule = None
        self._gathered, self._unreduced = frozenset(), ALL_REDUCED

    def begin_again(self, round_number: int) -> None:
        """All ranks go on after an error. Local, on all ranks."""
        self._place = 0
        self._agreement.begin_again(round_number)

    def invalidate(self) -> None:
        """The shards have changed: gather before the next use. Local."""
        self._gathered = frozenset()

    def forget_gradients(self) -> None:
        """Gradients of earlier micro-batches were dropped. Local."""
        self._unreduced = ALL_REDUCED

    def close(self) -> None:
        """End all agreements; schedules can still be asked for. Local."""
        self._agreement.close()
        self.give_up()

    # -- for reports -----------------------------------------------------------------------

    @property
    def last_training(self) -> UnitTrace | None:
        """The trace of the last forward that had its backward."""
        return self._traces.last_training()

    @property
    def seen(self) -> set[str]:
        """The units that took part in any trace that is kept."""
        return self._traces.units()

    def schedule(
        self,
        trace: UnitTrace,
        *,
        is_last: bool,
        gathered: frozenset[str] | None = None,
        unreduced: UnreducedGrads | None = None,
    ) -> Schedule:
        """The schedule of a micro-batch that follows `trace`, from the state there is, or another.

        Local.
        """
        gathered = self._gathered if gathered is None else gathered
        unreduced = self._unreduced if unreduced is None else unreduced
        schedules = self._schedules.setdefault(trace, {})
        key = gathered, unreduced, is_last
        if key not in schedules:
            schedules[key] = self._compile(trace.events, gathered, unreduced, is_last=is_last)
        return schedules[key]

    # -- departures ------------------------------------------------------------------------

    def _depart(self, event: UnitEvent, expected: Operation | None) -> Sequence[Operation]:
        foreseen = "the end of the schedule" if expected is None else " ".join(expected)
        self._agreement.agree(self._place, f"{' '.join(event)}, where {foreseen} was foreseen")
        taken = self._steps_taken()
        before = events_of(taken)
        self._plan_again(taken, self._traces.resume(self._context, before, event))
        if self._on_demand is not None:
            return self._on_demand.steps_for(event)
        self._place -= 1
        return self.steps_for(event)

    def _plan_again(self, taken: tuple[Operation, ...], events: Sequence[UnitEvent] | None) -> None:
        """Go on from what was done, with a schedule for `events`, or on demand without any."""
        self._taken, self._next = taken, 0
        self._on_demand = self._schedule = None
        if events is None:
            self._on_demand = self._make_on_demand(taken)
            return
        self._events = events
        self._schedule = self._compile(
            events, self._gathered, self._unreduced, is_last=self._is_last, taken=taken
        )

    def _compile(
        self,
        events: Sequence[UnitEvent],
        gathered: frozenset[str],
        unreduced: UnreducedGrads,
        *,
        is_last: bool,
        taken: tuple[Operation, ...] = (),
    ) -> Schedule:
        return compile_schedule(
            events,
            self._scheduled(is_last),
            prefetch=self._policy.prefetch,
            prefetch_bytes=self._policy.prefetch_bytes,
            prefetch_backward=self._policy.prefetch_backward,
            inflight_reduce=self._policy.inflight_reduce,
            gathered=gathered,
            unreduced=unreduced,
            is_last=is_last,
            taken=taken,
        )

    def _make_on_demand(self, taken: tuple[Operation, ...]) -> OnDemand:
        return OnDemand(
            self._scheduled(self._is_last),
            inflight_reduce=self._policy.inflight_reduce,
            gathered=self._gathered,
            unreduced=self._unreduced,
            is_last=self._is_last,
            taken=taken,
        )

    def _steps_taken(self) -> tuple[Operation, ...]:
        if self._on_demand is not None:
            return tuple(self._on_demand.steps)
        assert self._schedule is not None
        return (*self._taken, *self._schedule.steps[: self._next])

    def _scheduled(self, is_last: bool) -> list[ScheduledGroup]:
        return [scheduled_group(plan, is_last=is_last) for plan in self._plans]


MOST_TRACES = 16
"""Number of different traces that are kept for each way to begin a micro-batch."""


@dataclass(frozen=True, eq=False)
class UnitTrace:
    """The events of one micro-batch from its beginning to its end.

    Args:
        events: Beginnings and ends of units, in order; the last one is `end`.
    """

    events: tuple[UnitEvent, ...]

    @property
    def trains(self) -> bool:
        """True for a forward and its backward."""
        return self.events[0].phase == "forward" and self.events[-1].phase == "backward"


class UnitTraces:
    """Traces by what is known when a micro-batch begins: its context.

    A context is, for example, a forward with gradients enabled that one of the model's entry points
    began. Within one, the guess is what followed the last time after the same two traces.
    """

    def __init__(self) -> None:
        # The last one that was used is the last one in its list.
        self._known: dict[str, list[UnitTrace]] = {}
        self._history: dict[str, tuple[UnitTrace, ...]] = {}
        self._after: dict[tuple[str, tuple[UnitTrace, ...]], UnitTrace] = {}

    def guess(self, context: str) -> UnitTrace | None:
        """The trace that most likely comes next; None if there was none."""
        known = self._known.get(context)
        if not known:
            return None
        history = self._history[context]
        for length in (2, 1):
            found = self._after.get((context, history[-length:]))
            if found is not None:
                return found
        return known[-1]

    def learn(self, context: str, events: Sequence[UnitEvent]) -> UnitTrace:
        """Remember that a micro-batch did this; returns the trace, the same for equal events."""
        known = self._known.setdefault(context, [])
        events = tuple(events)
        trace = next((one for one in known if one.events is events or one.events == events), None)
        if trace is None:
            trace = UnitTrace(events)
            known.append(trace)
            if len(known) > MOST_TRACES:
                self._forget(context, known.pop(0))
        elif trace is not known[-1]:
            known.remove(trace)
            known.append(trace)
        history = self._history.get(context, ())
        for length in range(1, len(history) + 1):
            self._after[context, history[-length:]] = trace
        self._history[context] = (*history, trace)[-2:]
        return trace

    def resume(
        self, context: str, before: Sequence[UnitEvent], event: UnitEvent
    ) -> Sequence[UnitEvent] | None:
        """The events of a whole micro-batch that begins with `before` and goes on with `event`.

        They are those of a known one, if it begins like that; else those of one that does the
        same from `event` on, without the backward of units that took no part in forward.

        Args:
            context: Context of the micro-batch.
            before: Events of the micro-batch so far.
            event: The next event, another one than was expected.
        """
        known = self._known.get(context, [])[::-1]
        length, before = len(before), tuple(before)
        for trace in known:
            if trace.events[length : length + 1] == (event,) and trace.events[:length] == before:
                return trace.events
        count = before.count(event)
        for trace in known:
            places = [place for place, other in enumerate(trace.events) if other == event]
            if len(places) > count:
                return _joined(before, trace.events[places[count] :])
        return None

    def last_training(self) -> UnitTrace | None:
        """The last one that was a forward and its backward."""
        found = [trace for known in self._known.values() for trace in known if trace.trains]
        recent = [trace for history in self._history.values() for trace in history[::-1]]
        return next((trace for trace in recent if trace in found), found[-1] if found else None)

    def units(self) -> set[str]:
        """The units that took part in any trace that is kept."""
        return {
            event.unit
            for known in self._known.values()
            for trace in known
            for event in trace.events
        }

    def _forget(self, context: str, trace: UnitTrace) -> None:
        for key in [k for k, after in self._after.items() if after is trace or trace in k[1]]:
            del self._after[key]
        self._history[context] = tuple(t for t in self._history[context] if t is not trace)


def _joined(before: tuple[UnitEvent, ...], after: tuple[UnitEvent, ...]) -> tuple[UnitEvent, ...]:
    used = Counter(event.unit for event in (*before, *after) if event.phase == "forward")
    if after[0].phase == "forward":
        after = tuple(m for m in after if m.phase == "forward" or used[m.unit])
    return before + after
