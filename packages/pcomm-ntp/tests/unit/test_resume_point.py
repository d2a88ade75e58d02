"""The commit protocol, explored: every order of events, with a kill or a stop at every point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest

from pcomm.core.errors import DivergenceError
from pcomm.ntp.session.resume_point import NONE, RankState, ResumePoint, resume_point

STEPS = 2
Rule = Callable[[Mapping[int, RankState]], ResumePoint]

# Where a rank is: it computes, waits until all are ready, applies, says what it has, waits for the
# decision, moves state, waits until that is complete everywhere; or it is through, or gone.
END = frozenset[int]()
COMPUTE, READY, APPLY, ARRIVE, DECIDE, MOVE, COMPLETE, DONE, FENCED, DEAD = range(10)


# Tuples, since millions of them are compared and hashed.
class Rank(NamedTuple):
    at: int = COMPUTE
    generation: int = 0
    confirmed: int = 0
    complete: int = NONE
    # Each step that its state has, as the generation in which the gradients were summed.
    steps: tuple[int, ...] = ()
    is_ready: bool = False
    is_stopped: bool = False


class World(NamedTuple):
    ranks: tuple[Rank, ...] = (Rank(), Rank(), Rank())
    # What ranks have entered or left: ("ready", generation, step, rank) and others.
    marks: frozenset[tuple[object, ...]] = frozenset()
    # The ranks of each generation, END behind the last one, and what each rank said when it left.
    members: tuple[frozenset[int], ...] = (frozenset({0, 1, 2}),)
    said: frozenset[tuple[int, int, RankState, tuple[int, ...]]] = frozenset()
    kills: int = 0
    stops: int = 0
    joins: int = 0
    # Errors of transport although no rank is gone.
    alarms: int = 0

    def put(self, r: int, rank: Rank, *marks: tuple[object, ...]) -> World:
        ranks = (*self.ranks[:r], rank, *self.ranks[r + 1 :])
        return self._replace(ranks=ranks, marks=self.marks.union(marks))

    def is_gone(self, r: int) -> bool:
        return self.ranks[r].at == DEAD or self.ranks[r].is_stopped

    def everywhere(self, mark: str, g: int, step: int) -> bool:
        return all((mark, g, step, m) in self.marks for m in self.members[g])


def following(world: World, rule: Rule) -> Iterator[World]:
    """Every world that one event makes of this one."""
    for r, rank in enumerate(world.ranks):
        if rank.at in (DEAD, FENCED, DONE):
            continue
        if rank.is_stopped:
            yield world.put(r, rank._replace(is_stopped=False))
            continue
        if world.kills:
            yield world.put(r, rank._replace(at=DEAD))._replace(kills=world.kills - 1)
        if world.stops:
            stopped = world.put(r, rank._replace(is_stopped=True))
            yield stopped._replace(stops=world.stops - 1)
        yield from moves(world, r, rank, rule)


def moves(world: World, r: int, rank: Rank, rule: Rule) -> Iterator[World]:
    g, step = rank.generation, len(rank.steps)
    has_failed = any(world.is_gone(m) or ("left", g, m) in world.marks for m in world.members[g])
    if rank.at in (COMPUTE, READY, MOVE, COMPLETE) and has_failed:
        # A collective may still end for some ranks where others find the failure.
        yield world.put(r, rank._replace(at=ARRIVE))
    elif rank.at in (READY, MOVE, COMPLETE) and world.alarms:
        alarm = world.put(r, rank._replace(at=ARRIVE))
        yield alarm._replace(alarms=world.alarms - 1)
    if rank.at in (COMPUTE, DECIDE) and world.members[g + 1 :] == (END,):
        yield world.put(r, rank._replace(at=DONE))
    elif rank.at == COMPUTE and step == STEPS:
        if ("end", g, step, r) not in world.marks:
            yield world.put(r, rank, ("end", g, step, r))
        elif world.everywhere("end", g, STEPS) and len(world.members) == g + 1:
            yield world._replace(members=(*world.members, END))
    elif rank.at == COMPUTE:
        yield world.put(r, rank._replace(at=READY, is_ready=True), ("ready", g, step, r))
    elif rank.at == READY:
        if world.everywhere("ready", g, step):
            yield world.put(r, rank._replace(at=APPLY))
    elif rank.at == APPLY:
        applied = rank._replace(at=COMPUTE, steps=(*rank.steps, g), is_ready=False)
        yield world.put(r, applied)
    elif rank.at == ARRIVE:
        own = RankState(rank.confirmed, rank.complete, step, rank.is_ready)
        told = world._replace(said=world.said | {(g, r, own, rank.steps)})
        yield told.put(r, rank._replace(at=DECIDE), ("left", g, r))
    elif rank.at == DECIDE:
        yield from decisions(world, r, rank, rule)
    elif rank.at == MOVE:
        if ("moving", g, step, r) not in world.marks:
            yield world.put(r, rank, ("moving", g, step, r))
        elif world.everywhere("moving", g, step):
            moved = rank._replace(at=COMPLETE, complete=g)
            yield world.put(r, moved, ("complete", g, step, r))
    elif rank.at == COMPLETE and world.everywhere("complete", g, step):
        yield world.put(r, rank._replace(at=COMPUTE, confirmed=g, complete=NONE))


def decisions(world: World, r: int, rank: Rank, rule: Rule) -> Iterator[World]:
    g = rank.generation
    here = {m: own for at, m, own, _ in world.said if at == g}
    if len(world.members) > g + 1:
        yield world.put(r, entered(world, r, rank, rule))
        return
    # The first to propose decides: all that said something, or all but those known as gone.
    if not all(m in here or world.is_gone(m) for m in world.members[g]):
        return
    known = {m for m in here if m != r and world.is_gone(m)}
    for left_out in {frozenset[int](), frozenset(known)}:
        chosen = frozenset(here) - left_out
        yield world._replace(members=(*world.members, chosen))
        for m, other in enumerate(world.ranks):
            if world.joins and other.at == DEAD and m not in chosen:
                decided = world._replace(members=(*world.members, chosen | {m}))
                new = Rank(generation=g, confirmed=NONE)
                joined = decided.put(m, entered(decided, m, new, rule))
                yield joined._replace(joins=world.joins - 1)


def entered(world: World, r: int, rank: Rank, rule: Rule) -> Rank:
    """The rank after it has read the decision."""
    g, chosen = rank.generation, world.members[rank.generation + 1]
    if r not in chosen:
        return rank._replace(at=FENCED)
    said = {m: (own, steps) for at, m, own, steps in world.said if at == g and m in chosen}
    point = rule({m: own for m, (own, _) in said.items()})
    states = {m: said[m][1] + ((g,) if m in point.behind else ()) for m in point.holders}
    assert all(said[m][0].is_ready for m in point.behind)
    assert len(set(states.values())) == 1, f"the states of survivors differ: {states}"
    state = states[point.holders[0]]
    assert len(state) == point.applied
    assert r in states or rank.confirmed == NONE, "the state of a survivor is dropped"
    assert r not in states or state[: len(rank.steps)] == rank.steps, "a step was taken back"
    return Rank(
        at=MOVE,
        generation=g + 1,
        confirmed=point.generation if r in point.holders else NONE,
        steps=state,
    )


def explore(rule: Rule, first: World) -> int:
    """Visit every world that can come about, check those that end; returns their number."""
    seen, open_, num_ends = {first}, [first], 0
    while open_:
        world = open_.pop()
        found = list(following(world, rule))
        if not found:
            num_ends += 1
            ends = [rank for rank in world.ranks if rank.at not in (DEAD, FENCED)]
            assert all(rank.at == DONE for rank in ends), f"a rank waits for ever: {world}"
            assert ends
            assert {len(rank.steps) for rank in ends} <= {STEPS}
            assert len({rank.steps for rank in ends}) <= 1, f"survivors differ: {world}"
        for other in found:
            if other not in seen:
                seen.add(other)
                open_.append(other)
    return num_ends


@pytest.mark.parametrize(
    "first",
    [World(kills=1), World(kills=1, joins=1), World(stops=1), World(alarms=1)],
    ids=["kill", "join", "stop", "alarm"],
)
def test_no_order_of_events_applies_a_step_twice_or_half(first: World) -> None:
    assert explore(resume_point, first) > 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "first",
    [World(kills=2), World(kills=1, alarms=1, joins=1), World(stops=1, alarms=1), World(stops=2)],
    ids=["kills", "kill-alarm-join", "stop-alarm", "stops"],
)
def test_no_order_of_two_failures_applies_a_step_twice_or_half(first: World) -> None:
    assert explore(resume_point, first) > 1


def lowest(arrivals: Mapping[int, RankState]) -> ResumePoint:
    """A rule that has every rank repeat the step, also those that have applied it."""
    point = resume_point(arrivals)
    return replace(point, applied=min(arrivals[r].applied for r in point.holders), behind=())


def oldest(arrivals: Mapping[int, RankState]) -> ResumePoint:
    """A rule that goes back to the state of the generation before."""
    generation = min(own.confirmed for own in arrivals.values() if own.confirmed != NONE)
    holders = tuple(r for r, own in arrivals.items() if own.confirmed == generation)
    return replace(resume_point(arrivals), generation=generation, holders=holders)


@pytest.mark.parametrize(("rule", "first"), [(lowest, World(kills=1)), (oldest, World(alarms=2))])
def test_another_rule_is_found_to_be_wrong(rule: Rule, first: World) -> None:
    with pytest.raises(AssertionError):
        explore(rule, first)


def test_the_highest_state_counts_and_its_laggards_follow() -> None:
    found = resume_point({0: RankState(3, applied=7), 2: RankState(3, applied=6, is_ready=True)})
    assert found == ResumePoint(3, 7, (0, 2), (2,))


def test_a_generation_that_one_rank_has_confirmed_is_complete_on_the_others() -> None:
    arrivals = {0: RankState(5, applied=2), 1: RankState(4, 5, 2), 3: RankState(NONE, 5, 2)}
    assert resume_point(arrivals) == ResumePoint(5, 2, (0, 1, 3), ())
    unconfirmed = {1: RankState(4, 5, 2), 3: RankState(NONE, 5, 2)}
    assert resume_point(unconfirmed) == ResumePoint(4, 2, (1,), ())


def test_ranks_without_a_state_start_the_job() -> None:
    assert resume_point({0: RankState(), 1: RankState()}) == ResumePoint(NONE, 0, (), ())


@pytest.mark.parametrize(
    "stray",
    [RankState(3, applied=5, is_ready=True), RankState(3, applied=6), RankState(2, applied=7)],
    ids=["two steps behind", "not ready", "without the state"],
)
def test_states_that_do_not_belong_together_are_an_error(stray: RankState) -> None:
    with pytest.raises(DivergenceError, match="rank 1"):
        resume_point({0: RankState(3, applied=7), 1: stray})
