"""Guesses of what a micro-batch does, from what those before did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_support.schedules import chain
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import (
    ALL_REDUCED,
    OnDemand,
    ScheduledGroup,
    Step,
    UnitEvent,
    compile_schedule,
    events_of,
)
from pcomm.fsdp.runtime.schedule_executor import MOST_TRACES, UnitTraces


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


def groups_of(keep: str = "use") -> list[ScheduledGroup]:
    units = [ROOT, *(f"b{i}" for i in range(6))]
    return [ScheduledGroup(f"{u}.w", u, 10, keep, True, False) for u in units]  # type: ignore[arg-type]


def steps_until(events: Sequence[UnitEvent], number: int, prefetch: int) -> tuple[Step, ...]:
    """What was done up to an event, and nothing that blocks after it."""
    steps = compiled(events, prefetch)
    places = [place for place, step in enumerate(steps) if step.is_anchor]
    place = places[number - 1] + 1
    while not steps[place].is_anchor and not steps[place].is_blocking:
        place += 1
    return steps[:place]


def compiled(
    events: Sequence[UnitEvent], prefetch: int, taken: Sequence[Step] = ()
) -> tuple[Step, ...]:
    return compile_schedule(
        events,
        groups_of(),
        prefetch=prefetch,
        prefetch_bytes=None,
        inflight_reduce=1,
        gathered=frozenset(),
        unreduced=ALL_REDUCED,
        is_last=True,
        taken=taken,
    ).steps


def replay(steps: Sequence[Step]) -> int:
    """Refuses what makes no sense; the most buffers that there were at once beside the root's."""
    live: set[str] = set()
    waiting: set[str] = set()
    reducing: set[str] = set()
    most = 0
    for step in steps:
        if step.kind == "gather":
            assert step.name not in live
            live.add(step.name)
            waiting.add(step.name)
        elif step.kind == "wait_gather":
            waiting.remove(step.name)
        elif step.kind == "release":
            assert step.name not in waiting
            live.remove(step.name)
        elif step.kind == "use":
            assert f"{step.name}.w" in live - waiting, step
        elif step.kind == "reduce":
            assert step.name not in reducing
            reducing.add(step.name)
        elif step.kind == "wait_reduce":
            reducing.remove(step.name)
        most = max(most, len(live - {f"{ROOT}.w"}))
    assert not live | waiting | reducing
    return most


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
        steps = compiled([*before, *rest], prefetch, taken)
        assert list(events_of([*taken, *steps])) == [*before, *rest]
        assert replay([*taken, *steps]) <= 1 + prefetch
        on_demand = OnDemand(
            groups_of(), inflight_reduce=1, gathered=frozenset(), is_last=True, taken=taken
        )
        for event in rest:
            on_demand.steps_for(event)
        assert on_demand.events == [*before, *rest]
        assert replay(on_demand.steps) <= 1 + prefetch


@pytest.mark.parametrize("keep", ["step", "always"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("number", [3, 4, 9])
def test_what_is_kept_and_was_not_used_is_waited_for(
    number: int, *, is_last: bool, keep: str
) -> None:
    """Gathered ahead for units that were left out: later ones take it for gathered."""
    events = chain(6)
    options: dict[str, Any] = {"inflight_reduce": 1, "unreduced": ALL_REDUCED, "is_last": is_last}
    ahead: dict[str, Any] = {**options, "prefetch": 3, "prefetch_bytes": None}
    nothing: frozenset[str] = frozenset()
    foreseen = compile_schedule(events, groups_of(keep), gathered=nothing, **ahead).steps
    places = [place for place, step in enumerate(foreseen) if step.is_anchor]
    taken = foreseen[: places[number - 1] + 1]
    used = {event.unit for event in events[:number]}
    rest = [event for event in events[number:] if event.unit in used]
    again = [*events[:number], *rest]
    planned = compile_schedule(again, groups_of(keep), gathered=nothing, taken=taken, **ahead)
    on_demand = OnDemand(groups_of(keep), gathered=nothing, taken=taken, **options)
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
    steps = compiled([*events[:-2], *again, *end], 1)
    reduces = [step.name for step in steps if step.kind == "reduce"]
    assert sorted(reduces) == sorted({f"{m.unit}.w" for m in events})
    replay(steps)
    # Not foreseen, it is reduced each time, one after another.
    on_demand = OnDemand(groups_of(), inflight_reduce=9, gathered=frozenset(), is_last=True)
    for event in [*events[:-2], *again, *end]:
        on_demand.steps_for(event)
    replay(on_demand.steps)
    assert [step.kind for step in on_demand.steps].count("reduce") == 13


def test_a_sum_over_replicas_has_ended_before_more_is_added() -> None:
    events = chain(2)
    again = [m for m in events if m.phase == "backward" and m.unit != ROOT]
    units = [ROOT, "b0", "b1"]
    with_replicas = [
        ScheduledGroup(f"{u}.w", u, 10, "use", True, True, has_replicas=True) for u in units
    ]
    on_demand = OnDemand(with_replicas, inflight_reduce=1, gathered=frozenset(), is_last=True)
    for event in [*events[:-2], *again, *events[-2:]]:
        on_demand.steps_for(event)
    summing: set[str] = set()
    for step in on_demand.steps:
        assert not (step.kind == "wait_reduce" and step.name in summing)
        if step.kind == "all_reduce":
            assert step.name not in summing
            summing.add(step.name)
        elif step.kind == "wait_all_reduce":
            summing.remove(step.name)
    assert not summing
    assert on_demand.unreduced == ALL_REDUCED
