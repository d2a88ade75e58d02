"""Compiled schedules, executed by a machine that refuses what makes no sense."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_support.schedules import chain, random_events
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import (
    OnDemand,
    Schedule,
    ScheduledGroup,
    Step,
    UnitEvent,
    compile_schedule,
)
from pcomm.fsdp.settings import Keep


def groups_of(
    events: list[UnitEvent], keep: Keep = "use", *, reduces: bool = True, all_reduces: bool = False
) -> list[ScheduledGroup]:
    units = sorted({event.unit for event in events})
    return [ScheduledGroup(f"{unit}.w", unit, 10, keep, reduces, all_reduces) for unit in units]


@dataclass
class Machine:
    """Executes steps and refuses what makes no sense."""

    groups: dict[str, ScheduledGroup]
    gathered: set[str] = field(default_factory=set)
    in_flight: set[str] = field(default_factory=set)
    reducing: set[str] = field(default_factory=set)
    all_reducing: set[str] = field(default_factory=set)
    reduced: list[str] = field(default_factory=list)
    most_gathered: int = 0
    most_reducing: int = 0

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            getattr(self, step.kind)(step)
            live = self.gathered | self.in_flight
            self.most_gathered = max(self.most_gathered, len(live - {f"{ROOT}.w"}))

    def use(self, step: Step) -> None:
        # What is on its way beside computation; one more is issued before the oldest is ended.
        self.most_reducing = max(self.most_reducing, len(self.reducing))
        for group in self.groups.values():
            if group.unit == step.name:
                assert group.name in self.gathered, f"{step} without its parameters"

    def done(self, step: Step) -> None:
        pass

    end = done

    def gather(self, step: Step) -> None:
        assert step.name not in self.gathered | self.in_flight
        self.in_flight.add(step.name)

    def wait_gather(self, step: Step) -> None:
        self.in_flight.remove(step.name)
        self.gathered.add(step.name)

    def release(self, step: Step) -> None:
        self.gathered.remove(step.name)

    def reduce(self, step: Step) -> None:
        assert step.name not in self.reducing
        self.reducing.add(step.name)
        self.reduced.append(step.name)

    def wait_reduce(self, step: Step) -> None:
        self.reducing.remove(step.name)

    def all_reduce(self, step: Step) -> None:
        assert step.name not in self.reducing
        self.all_reducing.add(step.name)

    def wait_all_reduce(self, step: Step) -> None:
        self.all_reducing.remove(step.name)


def compiled(events: list[UnitEvent], groups: list[ScheduledGroup], **options: object) -> Schedule:
    defaults: dict[str, object] = {
        "prefetch": 1,
        "prefetch_bytes": None,
        "inflight_reduce": 2,
        "gathered": frozenset(),
        "is_last": True,
    }
    return compile_schedule(events, groups, **(defaults | options))  # type: ignore[arg-type]


@given(
    random_events(),
    st.sampled_from(["use", "backward", "step", "always"]),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0, 25]),
    st.sampled_from([None, 0, 1, 3]),
)
def test_any_model_runs(
    events: list[UnitEvent],
    keep: Keep,
    prefetch: int,
    inflight: int,
    is_last: bool,
    all_reduces: bool,
    limit: int | None,
    prefetch_backward: int | None,
) -> None:
    groups = groups_of(events, keep, all_reduces=all_reduces and is_last)
    machine = Machine({group.name: group for group in groups})
    for _ in range(2):
        schedule = compiled(
            events,
            groups,
            prefetch=prefetch,
            prefetch_bytes=limit,
            inflight_reduce=inflight,
            gathered=frozenset(machine.gathered),
            is_last=is_last,
            prefetch_backward=prefetch_backward,
        )
        machine.reduced.clear()
        machine.run(schedule.steps)
        assert [(s.kind, s.name, s.phase) for s in schedule.steps if s.is_anchor] == events
        assert not machine.in_flight | machine.reducing | machine.all_reducing
        backward = {m.unit for m in events if m.kind == "done" and m.phase == "backward"}
        assert sorted(machine.reduced) == sorted(f"{unit}.w" for unit in backward)
        assert machine.most_reducing <= inflight
        if keep in ("use", "backward"):
            assert not machine.gathered
        if not is_last:
            assert machine.gathered == schedule.gathered_at_end
        if is_last:
            assert not schedule.gathered_at_end, "what the optimizer makes stale"
        if is_last and keep == "always":
            # The memory stays, what is in it does not count.
            machine.gathered.clear()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_units_that_are_gathered_at_once_are_bounded(prefetch: int) -> None:
    events = chain(8)
    groups = groups_of(events)
    machine = Machine({group.name: group for group in groups})
    schedule = compiled(events, groups, prefetch=prefetch)
    machine.run(schedule.steps)
    assert machine.most_gathered == 1 + prefetch
    # All but the last of forward twice, and the root once.
    assert schedule.count("gather") == 1 + 2 * 8 - (1 + prefetch)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_without_prefetch_in_backward_a_unit_computes_beside_no_other(prefetch: int) -> None:
    """Forward, and what stays for backward, are those of `prefetch`; so are the bytes."""
    events = chain(8)
    groups = groups_of(events)
    schedule = compiled(events, groups, prefetch=prefetch, prefetch_backward=0, inflight_reduce=1)
    usual = compiled(events, groups, prefetch=prefetch, inflight_reduce=1)
    turn = next(i for i, step in enumerate(schedule.steps) if step.phase == "backward")
    assert schedule.steps[:turn] == usual.steps[:turn]
    assert schedule.count("gather") == usual.count("gather")
    steps = schedule.steps
    place = {step: i for i, step in enumerate(steps)}
    for i in range(8 - (1 + prefetch)):
        gather, done = (
            place[Step("gather", f"b{i}.w", "backward")],
            Step("done", f"b{i + 1}", "backward"),
        )
        # After the unit before has ended, and before anything else goes on the wire.
        assert place[done] < gather < place[Step("reduce", f"b{i + 1}.w", "backward")]


def test_backward_may_look_further_ahead_than_forward() -> None:
    events = chain(8)
    groups = groups_of(events)
    machine = Machine({group.name: group for group in groups})
    machine.run(compiled(events, groups, prefetch=0, prefetch_backward=3).steps)
    assert machine.most_gathered == 1 + 3


def test_a_budget_of_bytes_limits_the_depth_but_not_below_one() -> None:
    events = chain(8)
    groups = groups_of(events)
    for limit, depth in ((0, 1), (10, 1), (29, 2), (30, 3)):
        machine = Machine({group.name: group for group in groups})
        machine.run(compiled(events, groups, prefetch=5, prefetch_bytes=limit).steps)
        assert machine.most_gathered <= 1 + depth


def places(schedule: Schedule) -> dict[tuple[str, str], int]:
    """Where the last step of each kind and name is."""
    return {(step.kind, step.name): i for i, step in enumerate(schedule.steps)}


def test_gathers_go_before_the_reduce_of_what_has_ended() -> None:
    events = chain(6)
    place = places(compiled(events, groups_of(events), inflight_reduce=6))
    for i in range(5, 1, -1):
        assert place["gather", f"b{i - 2}.w"] < place["reduce", f"b{i}.w"]


def test_what_is_needed_later_is_gathered_in_the_memory_of_the_reduce_that_ends_first() -> None:
    events = chain(6)
    place = places(compiled(events, groups_of(events), inflight_reduce=1))
    for i in range(4, 1, -1):
        # The next unit's parameters are on their way before anything queues in front of them.
        assert place["gather", f"b{i - 1}.w"] < place["reduce", f"b{i}.w"]
        assert place["reduce", f"b{i}.w"] < place["wait_reduce", f"b{i + 1}.w"]
        assert place["wait_reduce", f"b{i + 1}.w"] < place["gather", f"b{i - 2}.w"]
        assert place["gather", f"b{i - 2}.w"] < place["use", f"b{i - 1}"]


def test_reduces_of_one_unit_count_as_one() -> None:
    """A unit has several groups where its experts or formats have groups of their own."""
    events = chain(4)
    one = groups_of(events)
    twice = [*one, *(dataclasses.replace(b, name=f"{b.unit}.e") for b in one)]
    place = places(compiled(events, twice, inflight_reduce=1))
    for name in ("w", "e"):
        assert place["reduce", f"b2.{name}"] < place["wait_reduce", f"b3.{name}"]
        assert place["wait_reduce", f"b3.{name}"] < place["use", "b1"]
        assert place["use", "b1"] < place["wait_reduce", f"b2.{name}"]


def test_nothing_is_gathered_again_that_stays() -> None:
    events = chain(4)
    groups = groups_of(events, "step", reduces=False)
    first = compiled(events, groups, is_last=False)
    assert first.count("gather") == 5
    assert first.count("release") == first.count("reduce") == 0
    last = compiled(events, groups, gathered=first.gathered_at_end)
    assert last.count("gather") == 0
    assert last.count("release") == 5


@given(random_events())
def test_on_demand_is_a_schedule_without_foresight(events: list[UnitEvent]) -> None:
    groups = groups_of(events)
    recorder = OnDemand(groups, inflight_reduce=2, gathered=frozenset(), is_last=True)
    machine = Machine({group.name: group for group in groups})
    for event in events:
        machine.run(tuple(recorder.steps_for(event)))
    assert recorder.events == events
    assert not machine.gathered | machine.in_flight | machine.reducing


def test_it_can_be_read_and_compared() -> None:
    events = chain(4)
    schedule = compiled(events, groups_of(events))
    other = compiled(events, groups_of(events, "step"))
    assert schedule.fingerprint == compiled(events, groups_of(events)).fingerprint
    assert schedule.fingerprint != other.fingerprint
    lines = schedule.describe().splitlines()
    assert lines[0] == f"schedule {schedule.fingerprint}"
    assert any(f"gather {ROOT}.w, gather b0.w, wait_gather {ROOT}.w" in line for line in lines)
    assert "wait_reduce" in lines[-1]
