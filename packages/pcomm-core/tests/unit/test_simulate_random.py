"""Random programs: against a slow exact reference, collapsed against not, orders and bandwidths."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import DivergenceError
from pcomm.core.simulate.deadlock import DeadlockError, check_issue_order
from pcomm.core.simulate.engine import Timeline, simulate
from pcomm.core.simulate.program import Cluster, Programs, Rail, SimulatedCommunicator, Task

RANKS = 6
PARTITIONS = (
    ((0, 1, 2, 3, 4, 5),),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 2, 4), (1, 3, 5)),
    ((0, 1, 2), (5,), (4, 3)),
)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


@st.composite
def clusters(draw: st.DrawFn, *, one_rail_each: bool = False) -> Cluster:
    """Up to three communicators on one or two rails."""
    count = draw(st.integers(1, 3))
    rails = [
        Rail(f"rail{n}", draw(st.sampled_from([1.0, 3.0])), draw(st.sampled_from([0.0, 0.25])))
        for n in range(count)
    ]
    return Cluster(
        rails,
        [
            SimulatedCommunicator(
                f"q{n}",
                f"rail{n if one_rail_each else draw(st.integers(0, n))}",
                draw(st.sampled_from(PARTITIONS)),
                draw(st.sampled_from(["ring", "direct", "in_network"])),
            )
            for n in range(count)
        ],
    )


@st.composite
def programs_on(draw: st.DrawFn, cluster: Cluster) -> Programs:
    """Subsequences of one order that all ranks share, so nothing can wait in a circle.

    Ranks come in few kinds, so that some behave alike.
    """
    kind_of = draw(st.lists(st.integers(0, 2), min_size=RANKS, max_size=RANKS))
    lists: list[list[Task]] = [[] for _ in range(RANKS)]
    for n in range(draw(st.integers(1, 10))):
        where = draw(st.sampled_from([None, *cluster.communicators]))
        after = draw(st.sets(st.integers(0, max(0, n - 1)), max_size=2))
        if where is None:
            seconds = draw(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0])] * 3))
            made = [Task(f"t{n}", "compute", "compute", seconds=seconds[kind]) for kind in kind_of]
        else:
            kind = draw(st.sampled_from(KINDS))
            num_bytes = draw(st.sampled_from([0, 6, 12]))
            task = Task(f"t{n}", where.queue, kind, num_bytes=num_bytes)
            members = {rank for group in where.groups for rank in group}
            made = [task if rank in members else None for rank in range(RANKS)]
        for own, task in zip(lists, made, strict=True):
            if task is not None:
                known = {t.name for t in own}
                names = tuple(f"t{a}" for a in sorted(after) if f"t{a}" in known)
                own.append(replace(task, after=names))
    return {rank: tuple(own) for rank, own in enumerate(lists)}


@st.composite
def cases(draw: st.DrawFn, **keywords: bool) -> tuple[Programs, Cluster]:
    cluster = draw(clusters(**keywords))
    return draw(programs_on(cluster)), cluster


def check_dependencies(programs: Programs, cluster: Cluster, timeline: Timeline) -> None:
    groups = {c.queue: {r: g for g in c.groups for r in g} for c in cluster.communicators}
    for rank, tasks in programs.items():
        last: dict[str, float] = {}
        for task in tasks:
            time = timeline.time(task.name, rank)
            stops = [timeline.time(name, rank).stop_s for name in task.after]
            assert time.ready_s == max([last.get(task.queue, 0.0), *stops])
            last[task.queue] = time.stop_s
            if task.is_collective:
                others = [timeline.time(task.name, r) for r in groups[task.queue][rank]]
                assert time.start_s == max(other.ready_s for other in others)
                assert {other.stop_s for other in others} == {time.stop_s}
            else:
                assert time.start_s == time.ready_s
                assert time.stop_s == time.start_s + task.seconds
            assert time.stop_s >= time.start_s


def times(timeline: Timeline) -> list[float]:
    every = (t for rank in timeline.ranks for t in timeline.times(rank))
    return [at for t in every for at in (t.ready_s, t.start_s, t.stop_s)]


@given(cases())
@settings(max_examples=40, deadline=None)
def test_programs_of_one_order_finish_and_keep_their_dependencies(
    case: tuple[Programs, Cluster],
) -> None:
    programs, cluster = case
    check_issue_order(programs, cluster)
    timeline = simulate(programs, cluster)
    check_dependencies(programs, cluster, timeline)
    assert times(simulate(programs, cluster)) == times(timeline)
    path = timeline.critical_path()
    assert all(a.stop_s == b.start_s for a, b in pairwise(path))
    assert not path or (path[0].start_s, path[-1].stop_s) == (0.0, timeline.makespan_s)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_ranks_that_are_run_once_have_the_times_that_they_have_alone(
    case: tuple[Programs, Cluster],
) -> None:
    collapsed = simulate(*case)
    every = simulate(*case, collapse=False)
    assert every.num_rank_classes == RANKS
    assert times(collapsed) == pytest.approx(times(every), rel=1e-9, abs=1e-9)


@given(cases(), st.data())
@settings(max_examples=40, deadline=None)
def test_another_order_on_one_rank_finishes_or_says_that_it_cannot(
    case: tuple[Programs, Cluster], data: st.DataObject
) -> None:
    programs, cluster = case
    rank = data.draw(st.integers(0, RANKS - 1))
    programs = {**programs, rank: tuple(data.draw(st.permutations(programs[rank])))}
    timeline = finished(programs, cluster)
    if timeline is not None:
        check_dependencies(programs, cluster, timeline)
        return
    assert finished(programs, cluster, collapse=False) is None
    # Without dependencies that look ahead, only the order of issue can be at fault.
    if not any(looks_ahead(tasks) for tasks in programs.values()):
        with pytest.raises(DivergenceError):
            check_issue_order(programs, cluster)


def finished(programs: Programs, cluster: Cluster, **keywords: bool) -> Timeline | None:
    try:
        return simulate(programs, cluster, **keywords)
    except DeadlockError:
        return None


def looks_ahead(tasks: tuple[Task, ...]) -> bool:
    known: set[str] = set()
    for task in tasks:
        if not known.issuperset(task.after):
            return True
        known.add(task.name)
    return False


def faster(cluster: Cluster, factor: float) -> Cluster:
    rails = [replace(rail, bytes_per_s=rail.bytes_per_s * factor) for rail in cluster.rails]
    return replace(cluster, rails=rails)


@given(cases(one_rail_each=True), st.sampled_from([1.25, 2.0, 10.0]))
@settings(max_examples=30, deadline=None)
def test_more_bandwidth_never_ends_a_task_later_where_queues_do_not_share(
    case: tuple[Programs, Cluster], factor: float
) -> None:
    programs, cluster = case
    before, after = times(simulate(*case)), times(simulate(programs, faster(cluster, factor)))
    assert all(late >= early - 1e-9 for late, early in zip(before, after, strict=True))


def test_on_a_shared_rail_more_bandwidth_can_end_a_run_later() -> None:
    """Why the property above asks for rails of their own: an earlier start may be in the way."""
    program = (
        Task("a", "q0", "all_gather", num_bytes=1.0),
        Task("between", "compute", "compute", seconds=1.0, after=("a",)),
        Task("big", "q0", "all_gather", num_bytes=5.0, after=("between",)),
        Task("first", "other", "compute", seconds=1.9),
        Task("urgent", "q1", "all_gather", num_bytes=0.1, after=("first",)),
        Task("last", "other", "compute", seconds=10.0, after=("urgent",)),
    )
    cluster = Cluster(
        [Rail("r", 1.0)], [SimulatedCommunicator(q, "r", ((0, 1),)) for q in ("q0", "q1")]
    )
    slow, fast = (simulate(dict.fromkeys((0, 1), program), faster(cluster, f)) for f in (1, 1.1))
    assert slow.makespan_s == pytest.approx(12.0)
    assert fast.makespan_s > 12.05


@given(cases(), st.sampled_from([0.5, 4.0]))
@settings(max_examples=25, deadline=None)
def test_time_has_no_unit(case: tuple[Programs, Cluster], factor: float) -> None:
    """Everything `factor` times as slow takes `factor` times as long."""
    programs, cluster = case
    rails = [
        replace(r, bytes_per_s=r.bytes_per_s / factor, latency_s=r.latency_s * factor)
        for r in cluster.rails
    ]
    slower = {
        rank: tuple(replace(task, seconds=task.seconds * factor) for task in tasks)
        for rank, tasks in programs.items()
    }
    expected = [at * factor for at in times(simulate(*case))]
    assert times(simulate(slower, replace(cluster, rails=rails))) == pytest.approx(expected)


def reference(programs: Programs, queues: list[str], rate: int) -> dict[tuple[int, str], Fraction]:
    """Ends of all tasks, exactly, by looking at everything again at each event.

    For gathers on a ring of all ranks, all queues on one rail: n running ones get 1/n each.
    """
    size = len(programs)
    ended: dict[tuple[int, str], Fraction] = {}
    left: dict[tuple[int, str], Fraction] = {}
    now = Fraction(0)

    def is_ready(rank: int, task: Task) -> bool:
        on_queue = [t.name for t in programs[rank] if t.queue == task.queue]
        before = on_queue[: on_queue.index(task.name)]
        return all((rank, name) in ended for name in (*before, *task.after))

    while True:
        for rank, tasks in programs.items():
            for task in tasks:
                key = (rank if task.kind == "compute" else -1, task.name)
                if (rank, task.name) in ended or key in left:
                    continue
                ranks = [rank] if task.kind == "compute" else list(programs)
                if all(
                    is_ready(r, next(t for t in programs[r] if t.name == task.name)) for r in ranks
                ):
                    work = Fraction(task.num_bytes) * (size - 1) / rate
                    left[key] = Fraction(task.seconds) if key[0] >= 0 else work
        if not left:
            return ended
        moving = sum(rank < 0 for rank, _ in left)
        stops = {key: work * (moving if key[0] < 0 else 1) for key, work in left.items()}
        step = min(stops.values())
        now += step
        for key, stop in stops.items():
            left[key] -= step / (moving if key[0] < 0 else 1)
            if stop == step:
                del left[key]
                for rank in programs if key[0] < 0 else [key[0]]:
                    ended[rank, key[1]] = now


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_times_are_those_of_a_slow_exact_reference(data: st.DataObject) -> None:
    queues = ["q0", "q1", "q2"]
    cluster = Cluster(
        [Rail("r", 2.0)], [SimulatedCommunicator(q, "r", ((0, 1, 2),)) for q in queues]
    )
    lists: list[list[Task]] = [[], [], []]
    for n in range(data.draw(st.integers(1, 8))):
        queue = data.draw(st.sampled_from(["compute", *queues]))
        size = data.draw(st.sampled_from([0, 1, 2, 5]))
        for own in lists:
            after = tuple(data.draw(st.sets(st.sampled_from([t.name for t in own])))) if own else ()
            if queue == "compute":
                seconds = data.draw(st.sampled_from([0.25, 1.0, 3.0]))
                own.append(Task(f"t{n}", queue, "compute", seconds=seconds, after=after))
            else:
                own.append(Task(f"t{n}", queue, "all_gather", num_bytes=size, after=after))
    programs = dict(enumerate(lists))
    timeline = simulate(programs, cluster)
    found = {(r, t.name): t.stop_s for r in programs for t in timeline.times(r)}
    exact = reference(programs, queues, 2)
    assert found == pytest.approx({key: float(stop) for key, stop in exact.items()})
