"""The steps around each mark of a micro-batch: from a schedule, or on demand."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.compiler import OnDemand, compile_schedule
from pcomm.fsdp.runtime.departures import Departures
from pcomm.fsdp.runtime.schedule import (
    NOTHING_OWED,
    Mark,
    Owed,
    Schedule,
    ScheduledGroup,
    Step,
    marks_of,
    scheduled_group,
)
from pcomm.fsdp.runtime.traces import Trace, Traces
from pcomm.fsdp.settings.policy import CommPolicy

__all__ = ["Stepper"]


class Stepper:
    """Answers each mark of a micro-batch with steps, from the schedule of the trace it follows.

    A micro-batch of a kind that was never seen is answered on demand, and its marks are kept as a
    trace. One that departs from the trace that was guessed goes on with another one that fits, or
    on demand; the ranks agree on that first, so that none of them is alone with it.

    Args:
        plans: Plans of all groups that communicate or convert.
        policy: Depths; `checks_first_step` has ranks agree before each gather on demand.
        departures: Agreements between the ranks.
    """

    def __init__(
        self, plans: Sequence[GroupPlan], policy: CommPolicy, departures: Departures
    ) -> None:
        self._plans, self._policy, self._departures = plans, policy, departures
        self._traces = Traces()
        self._schedules: WeakKeyDictionary[Trace, dict[object, Schedule]] = WeakKeyDictionary()
        self._gathered: frozenset[str] = frozenset()
        self._owed = NOTHING_OWED
        self._place = 0
        self._context, self._is_last = "", True
        # One of the two answers; `_marks` are those of the schedule.
        self._on_demand: OnDemand | None = None
        self._schedule: Schedule | None = None
        self._marks: Sequence[Mark] = ()
        self._next = 0
        self._taken: tuple[Step, ...] = ()

    def begin(self, context: str, *, is_last: bool) -> None:
        """A micro-batch begins, of which no more is known than this. Local."""
        self._context, self._is_last = context, is_last
        self._taken, self._next = (), 0
        self._on_demand = self._schedule = None
        trace = self._traces.guess(context)
        if trace is None:
            self._on_demand = self._make_on_demand(())
        else:
            self._marks = trace.marks
            self._schedule = self.schedule(trace, is_last=is_last)

    def set_last(self, is_last: bool) -> None:
        """Say anew, when its backward begins, if it is the last one of its step. Local."""
        if is_last != self._is_last:
            self._is_last = is_last
            self._plan_again(self._steps_taken(), None if self._on_demand else self._marks)

    def steps_for(self, mark: Mark) -> Sequence[Step]:
        """The steps before and after `mark`, which is one of them.

        Collective where it was not foreseen.
        """
        self._place += 1
        if self._on_demand is not None:
            if mark.kind == "use" and self._policy.checks_first_step:
                self._departures.agree(self._place, " ".join(mark))
            return self._on_demand.steps_for(mark)
        assert self._schedule is not None
        steps, place = self._schedule.steps, self._next
        while place < len(steps) and not steps[place].is_anchor:
            place += 1
        expected = steps[place] if place < len(steps) else None
        if expected != (mark.kind, mark.unit, mark.phase):
            return self._depart(mark, expected)
        place += 1
        # What blocks is left to the moment where its result is needed.
        while place < len(steps) and not steps[place].is_anchor:
            if steps[place].is_blocking and mark.kind != "end":
                break
            place += 1
        taken, self._next = steps[self._next : place], place
        return taken

    def end(self) -> None:
        """The micro-batch has ended, and its steps are done. Collective if it was on demand."""
        if self._on_demand is not None:
            self._marks = tuple(self._on_demand.marks)
            lines = [" ".join(mark) for mark in self._marks]
            self._departures.agree(self._place, "\n".join(lines))
            self._gathered, self._owed = self._on_demand.gathered, self._on_demand.owed
        else:
            assert self._schedule is not None
            self._gathered = self._schedule.gathered_at_end
            self._owed = self._schedule.owed_at_end
        self._traces.learn(self._context, self._marks)
        self._on_demand = self._schedule = None

    def check_peers(self) -> None:
        """Raise if a rank has departed from what this one has done since. Local."""
        self._departures.check(self._place)

    def give_up(self) -> None:
        """The micro-batch will not end. Local."""
        self._on_demand = self._schedule = None
        self._gathered, self._owed = frozenset(), NOTHING_OWED

    def begin_again(self, round_number: int) -> None:
        """All ranks go on after an error. Local, on all ranks."""
        self._place = 0
        self._departures.begin_again(round_number)

    def invalidate(self) -> None:
        """The shards have changed: gather before the next use. Local."""
        self._gathered = frozenset()

    def forget_gradients(self) -> None:
        """Gradients of earlier micro-batches were dropped. Local."""
        self._owed = NOTHING_OWED

    def close(self) -> None:
        """End all agreements; schedules can still be asked for. Local."""
        self._departures.close()
        self.give_up()

    # -- for reports -----------------------------------------------------------------------

    @property
    def last_training(self) -> Trace | None:
        """The trace of the last forward that had its backward."""
        return self._traces.last_training()

    @property
    def seen(self) -> set[str]:
        """The units that took part in any trace that is kept."""
        return self._traces.units()

    def schedule(
        self,
        trace: Trace,
        *,
        is_last: bool,
        gathered: frozenset[str] | None = None,
        owed: Owed | None = None,
    ) -> Schedule:
        """The schedule of a micro-batch that follows `trace`, from the state there is, or another.

        Local.
        """
        gathered = self._gathered if gathered is None else gathered
        owed = self._owed if owed is None else owed
        schedules = self._schedules.setdefault(trace, {})
        key = gathered, owed, is_last
        if key not in schedules:
            schedules[key] = self._compile(trace.marks, gathered, owed, is_last=is_last)
        return schedules[key]

    # -- departures ------------------------------------------------------------------------

    def _depart(self, mark: Mark, expected: Step | None) -> Sequence[Step]:
        foreseen = "the end of the schedule" if expected is None else " ".join(expected)
        self._departures.agree(self._place, f"{' '.join(mark)}, where {foreseen} was foreseen")
        taken = self._steps_taken()
        before = marks_of(taken)
        self._plan_again(taken, self._traces.resume(self._context, before, mark))
        if self._on_demand is not None:
            return self._on_demand.steps_for(mark)
        self._place -= 1
        return self.steps_for(mark)

    def _plan_again(self, taken: tuple[Step, ...], marks: Sequence[Mark] | None) -> None:
        """Go on from what was done, with a schedule for `marks`, or on demand if there are none."""
        self._taken, self._next = taken, 0
        self._on_demand = self._schedule = None
        if marks is None:
            self._on_demand = self._make_on_demand(taken)
            return
        self._marks = marks
        self._schedule = self._compile(
            marks, self._gathered, self._owed, is_last=self._is_last, taken=taken
        )

    def _compile(
        self,
        marks: Sequence[Mark],
        gathered: frozenset[str],
        owed: Owed,
        *,
        is_last: bool,
        taken: tuple[Step, ...] = (),
    ) -> Schedule:
        return compile_schedule(
            marks,
            self._scheduled(is_last),
            prefetch=self._policy.prefetch,
            prefetch_bytes=self._policy.prefetch_bytes,
            prefetch_backward=self._policy.prefetch_backward,
            inflight_reduce=self._policy.inflight_reduce,
            gathered=gathered,
            owed=owed,
            is_last=is_last,
            taken=taken,
        )

    def _make_on_demand(self, taken: tuple[Step, ...]) -> OnDemand:
        return OnDemand(
            self._scheduled(self._is_last),
            inflight_reduce=self._policy.inflight_reduce,
            gathered=self._gathered,
            owed=self._owed,
            is_last=self._is_last,
            taken=taken,
        )

    def _steps_taken(self) -> tuple[Step, ...]:
        if self._on_demand is not None:
            return tuple(self._on_demand.steps)
        assert self._schedule is not None
        return (*self._taken, *self._schedule.steps[: self._next])

    def _scheduled(self, is_last: bool) -> list[ScheduledGroup]:
        return [scheduled_group(plan, is_last=is_last) for plan in self._plans]
