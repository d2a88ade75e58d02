"""Schedules, compiled and guessed, executed by a machine that refuses what makes no sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_support.schedules import Machine, chain, groups_of, random_events
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import (
    ALL_REDUCED,
    OnDemand,
    Operation,
    Schedule,
    ScheduledGroup,
    UnitEvent,
    compile_schedule,
    events_of,
)
from pcomm.fsdp.runtime.schedule_executor import MOST_TRACES, UnitTraces
from pcomm.fsdp.settings import Keep

# -- compiled schedules, executed by a machine that refuses what makes no sense -----------------


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
    machine = Machine(groups)
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
        assert not machine.on_their_way
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


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        *(({"prefetch": prefetch}, prefetch) for prefetch in range(4)),
        ({"prefetch": 0, "prefetch_backward": 3}, 3),
        # A budget of bytes limits the depth, but not below one.
        *(
            ({"prefetch": 5, "prefetch_bytes": limit}, depth)
            for limit, depth in ((0, 1), (10, 1), (29, 2), (30, 3))
        ),
    ],
    ids=str,
)
def test_units_that_are_gathered_at_once_are_bounded(options: dict[str, int], ahead: int) -> None:
    events = chain(8)
    groups = groups_of(events)
    machine = Machine(groups)
    schedule = compiled(events, groups, **options)
    machine.run(schedule.steps)
    if "prefetch_bytes" in options:
        assert machine.most_gathered <= 1 + ahead
    else:
        assert machine.most_gathered == 1 + ahead
    if len(options) == 1:
        # All but the last of forward twice, and the root once.
        assert schedule.count("gather") == 1 + 2 * 8 - (1 + ahead)


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
            place[Operation("gather", f"b{i}.w", "backward")],
            Operation("done", f"b{i + 1}", "backward"),
        )
        # After the unit before has ended, and before anything else goes on the wire.
        assert place[done] < gather < place[Operation("reduce", f"b{i + 1}.w", "backward")]


def places(schedule: Schedule) -> dict[tuple[str, str], int]:
    """Where the last step of each kind and name is."""
    return {(step.kind, step.name): i for i, step in enumerate(schedule.steps)}


def test_what_goes_before_the_reduce_of_what_has_ended() -> None:
    events = chain(6)
    place = places(compiled(events, groups_of(events), inflight_reduce=6))
    for i in range(5, 1, -1):
        assert place["gather", f"b{i - 2}.w"] < place["reduce", f"b{i}.w"]
    # What is needed later is gathered in the memory of the reduce that ends first.
    place = places(compiled(events, groups_of(events), inflight_reduce=1))
    for i in range(4, 1, -1):
        # The next unit's parameters are on their way before anything queues in front of them.
        order = [("gather", f"b{i - 1}.w"), ("reduce", f"b{i}.w"), ("wait_reduce", f"b{i + 1}.w")]
        order += [("gather", f"b{i - 2}.w"), ("use", f"b{i - 1}")]
        found = [place[one] for one in order]
        assert found == sorted(found)


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
    machine = Machine(groups)
    for event in events:
        machine.run(tuple(recorder.steps_for(event)))
    assert recorder.events == events
    assert not machine.gathered | machine.on_their_way


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


# -- guesses of what a micro-batch does, from what those before did -----------------------------


def without(dropped: Sequence[int], num_units: int = 6) -> tuple[UnitEvent, ...]:
    names = {f"b{number}" for number in dropped}
    return tuple(event for event in chain(num_units) if event.unit not in names)


def guesses(traces: UnitTraces, sequence: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each guess was right."""
    found = []
    for dropped in sequence:
        guess = traces.guess("train")
        found.append(guess is not None and guess.events == without(dropped))
        traces.learn("train", without(dropped))
    return found


@pytest.mark.parametrize(
    "period", [[[]], [[], [1]], [[], [], [1]], [[], [1], [2], [1, 2]]], ids=str
)
def test_what_repeats_is_foreseen(period: list[list[int]]) -> None:
    found = guesses(UnitTraces(), period * 6)
    assert not found[0]
    assert all(found[2 * len(period) + 1 :])


def test_contexts_are_guessed_apart() -> None:
    traces = UnitTraces()
    traces.learn("train", without([]))
    assert traces.guess("eval") is None
    traces.learn("eval", without([1]))
    assert traces.guess("train").events == without([])  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_traces_are_kept_as_there_is_room_for(more: int) -> None:
    traces = UnitTraces()
    every = [tuple(chain(number + 1)) for number in range(MOST_TRACES + more)]
    for events in every:
        traces.learn("train", events)
    again = traces.learn("train", every[more])
    assert again is traces.learn("train", every[more])
    oldest = traces.resume("train", every[0][:-2], every[0][-2])
    # A longer one has the same end, and other units in between.
    assert (oldest == every[0]) or more


def test_a_trace_that_was_dropped_is_guessed_no_more() -> None:
    traces = UnitTraces()
    traces.learn("train", without([1]))
    first = traces.learn("train", without([]))
    for number in range(MOST_TRACES):
        traces.learn("train", tuple(chain(10 + number)))
    traces.learn("train", without([1]))
    assert traces.guess("train") is not first


@pytest.mark.parametrize("dropped", [[0], [2], [2, 3], [5], [1, 4]], ids=str)
def test_a_step_that_leaves_units_out_goes_on_with_what_comes_after(dropped: list[int]) -> None:
    traces = UnitTraces()
    traces.learn("train", without([]))
    actual = without(dropped)
    expected: Sequence[UnitEvent] = without([])
    departures = 0
    for place, event in enumerate(actual):
        if expected[place] != event:
            departures += 1
            resumed = traces.resume("train", actual[:place], event)
            assert resumed is not None
            expected = resumed
    # One for each run of units in forward, none in backward.
    assert departures == (2 if dropped == [1, 4] else 1)
    assert tuple(expected) == actual


def test_a_known_trace_is_preferred() -> None:
    traces = UnitTraces()
    for dropped in ([], [1], [1, 3]):
        traces.learn("train", without(dropped))
    actual = without([1, 3])
    place = next(i for i, (a, b) in enumerate(zip(actual, without([1]), strict=False)) if a != b)
    assert traces.resume("train", actual[:place], actual[place]) == actual
    unheard = UnitEvent("use", "c", "forward")
    assert traces.resume("train", actual[:place], unheard) is None


def test_what_trained_last_is_reported() -> None:
    traces = UnitTraces()
    assert traces.last_training() is None
    forward = (*chain(6)[:14], UnitEvent("end", ROOT, "forward"))
    traces.learn("forward train", forward)
    assert traces.last_training() is None
    trained = traces.learn("forward train", without([]))
    traces.learn("forward train", forward)
    traces.learn("forward eval", forward)
    assert traces.last_training() is trained
    assert traces.units() == {ROOT, *(f"b{i}" for i in range(6))}


# -- schedules that begin in the middle --------------------------------------------------------


GROUPS = groups_of(chain(6))


def steps_until(events: Sequence[UnitEvent], number: int, prefetch: int) -> tuple[Operation, ...]:
    """What was done up to an event, and nothing that blocks after it."""
    steps = steps_along(events, prefetch)
    places = [place for place, step in enumerate(steps) if step.is_anchor]
    place = places[number - 1] + 1
    while not steps[place].is_anchor and not steps[place].is_blocking:
        place += 1
    return steps[:place]


def steps_along(
    events: Sequence[UnitEvent], prefetch: int, taken: Sequence[Operation] = ()
) -> tuple[Operation, ...]:
    return compile_schedule(
        events,
        GROUPS,
        prefetch=prefetch,
        prefetch_bytes=None,
        inflight_reduce=1,
        gathered=frozenset(),
        unreduced=ALL_REDUCED,
        is_last=True,
        taken=taken,
    ).steps


def replay(steps: Sequence[Operation]) -> int:
    """Refuses what makes no sense; the most buffers that there were at once beside the root's."""
    machine = Machine(GROUPS)
    machine.run(steps)
    assert not machine.gathered | machine.on_their_way
    return machine.most_gathered


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("number", [3, 4, 9, 13, 14, 16, 19])
def test_a_schedule_goes_on_from_any_place_with_other_marks(number: int, prefetch: int) -> None:
    """With foresight and without; what was gathered ahead for nothing is given back."""
    events = chain(6)
    for dropped in ([], [1], [4], [2, 3, 4, 5], [0, 5]):
        names = {f"b{i}" for i in dropped}
        before = list(events[:number])
        used = [m.unit for m in before]
        rest = [m for m in events[number:] if m.unit not in names or m.unit in used]
        taken = steps_until(events, number, prefetch)
        steps = steps_along([*before, *rest], prefetch, taken)
        assert list(events_of([*taken, *steps])) == [*before, *rest]
        assert replay([*taken, *steps]) <= 1 + prefetch
        on_demand = OnDemand(
            GROUPS, inflight_reduce=1, gathered=frozenset(), is_last=True, taken=taken
        )
        for event in rest:
            on_demand.steps_for(event)
        assert on_demand.events == [*before, *rest]
        assert replay(on_demand.steps) <= 1 + prefetch


@pytest.mark.parametrize("keep", ["step", "always"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("number", [3, 4, 9])
def test_what_is_kept_and_was_not_used_is_waited_for(
    number: int, *, is_last: bool, keep: Keep
) -> None:
    """Gathered ahead for units that were left out: later ones take it for gathered."""
    events = chain(6)
    options: dict[str, Any] = {"inflight_reduce": 1, "unreduced": ALL_REDUCED, "is_last": is_last}
    ahead: dict[str, Any] = {**options, "prefetch": 3, "prefetch_bytes": None}
    nothing: frozenset[str] = frozenset()
    groups = groups_of(events, keep)
    foreseen = compile_schedule(events, groups, gathered=nothing, **ahead).steps
    places = [place for place, step in enumerate(foreseen) if step.is_anchor]
    taken = foreseen[: places[number - 1] + 1]
    used = {event.unit for event in events[:number]}
    rest = [event for event in events[number:] if event.unit in used]
    again = [*events[:number], *rest]
    planned = compile_schedule(again, groups, gathered=nothing, taken=taken, **ahead)
    on_demand = OnDemand(groups, gathered=nothing, taken=taken, **options)
    for event in rest:
        on_demand.steps_for(event)
    for steps in ([*taken, *planned.steps], on_demand.steps):
        gathers = [step.name for step in steps if step.kind == "gather"]
        assert {f"b{i}.w" for i in range(6) if f"b{i}" not in used} & set(gathers)
        assert sorted(gathers) == sorted(step.name for step in steps if step.kind == "wait_gather")


def test_a_unit_that_backward_comes_to_again_is_reduced_once() -> None:
    events = chain(6)
    end = events[-2:]
    again = [m for m in events if m.phase == "backward" and m.unit != ROOT]
    steps = steps_along([*events[:-2], *again, *end], 1)
    reduces = [step.name for step in steps if step.kind == "reduce"]
    assert sorted(reduces) == sorted({f"{m.unit}.w" for m in events})
    replay(steps)
    # Not foreseen, it is reduced each time, one after another.
    on_demand = OnDemand(GROUPS, inflight_reduce=9, gathered=frozenset(), is_last=True)
    for event in [*events[:-2], *again, *end]:
        on_demand.steps_for(event)
    replay(on_demand.steps)
    assert [step.kind for step in on_demand.steps].count("reduce") == 13


def test_a_sum_over_replicas_has_ended_before_more_is_added() -> None:
    events = chain(2)
    again = [m for m in events if m.phase == "backward" and m.unit != ROOT]
    groups = groups_of(events, all_reduces=True, has_replicas=True)
    on_demand = OnDemand(groups, inflight_reduce=1, gathered=frozenset(), is_last=True)
    for event in [*events[:-2], *again, *events[-2:]]:
        on_demand.steps_for(event)
    machine = Machine(groups)
    machine.run(on_demand.steps)
    assert not machine.on_their_way
    assert on_demand.unreduced == ALL_REDUCED
