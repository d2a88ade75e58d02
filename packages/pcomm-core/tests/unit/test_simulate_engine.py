"""Small runs whose times are known by hand, wrong programs, deadlocks and the order of issue."""

from __future__ import annotations

import json
import pickle

import pytest

from pcomm.core.errors import ConfigError, DivergenceError, TopologyError
from pcomm.core.simulate.deadlock import DeadlockError, check_issue_order
from pcomm.core.simulate.engine import Timeline, simulate
from pcomm.core.simulate.program import Cluster, Rail, SimulatedCommunicator, Task
from pcomm.core.trace.events import chrome_trace, overlap_fraction

PAIR = ((0, 1),)
GATHER, REDUCE = "dp:gather", "dp:reduce"


def two_queues(
    reduce_rail: str = "a", algorithm: str = "ring", ranks: int = 2, **rail: object
) -> Cluster:
    """Gather on rail `a`, reduce on that or on `b`; 1 byte a second unless told."""
    groups = (tuple(range(ranks)),)
    rails = [Rail(name, **{"bytes_per_s": 1.0, **rail}) for name in "ab"]
    communicators = [
        SimulatedCommunicator(GATHER, "a", groups, algorithm),
        SimulatedCommunicator(REDUCE, reduce_rail, groups, algorithm),
    ]
    return Cluster(rails, communicators)


def compute(name: str, seconds: float, *after: str) -> Task:
    return Task(name, "compute", "compute", seconds=seconds, after=after)


def gather(name: str, num_bytes: float, *after: str, queue: str = GATHER) -> Task:
    return Task(name, queue, "all_gather", num_bytes=num_bytes, after=after)


def reduce(name: str, num_bytes: float, *after: str, queue: str = REDUCE) -> Task:
    return Task(name, queue, "reduce_scatter", num_bytes=num_bytes, after=after)


def spans(timeline: Timeline, rank: int = 0) -> dict[str, tuple[float, float]]:
    return {t.name: (t.start_s, t.stop_s) for t in timeline.times(rank)}


def on_both(*tasks: Task) -> dict[int, tuple[Task, ...]]:
    return dict.fromkeys((0, 1), tasks)


def test_queues_run_in_order_and_beside_each_other() -> None:
    timeline = simulate(
        on_both(gather("g0", 3), gather("g1", 3), compute("f0", 1, "g0"), compute("f1", 1, "g1")),
        two_queues(),
    )
    assert spans(timeline) == {"g0": (0, 3), "g1": (3, 6), "f0": (3, 4), "f1": (6, 7)}
    assert timeline.makespan_s == 7
    assert timeline.busy_s(GATHER) == 6
    assert timeline.overlap_s(GATHER, "compute") == 1
    assert [t.name for t in timeline.critical_path()] == ["g0", "g1", "f1"]


def test_two_collectives_share_a_rail_from_event_to_event() -> None:
    # Alone 3 and 4 seconds. Beside each other from 0; the first is done at 6, 1 of 4 is left.
    both = on_both(gather("g", 3), reduce("r", 8))
    assert spans(simulate(both, two_queues())) == {"g": (0, 6), "r": (0, 7)}
    assert spans(simulate(both, two_queues("b"))) == {"g": (0, 3), "r": (0, 4)}
    late = on_both(gather("g", 3), compute("c", 1), reduce("r", 8, "c"))
    assert spans(simulate(late, two_queues()))["g"] == (0, 5)
    assert spans(simulate(late, two_queues()))["r"] == (1, 7)


def test_where_the_processor_sends_computing_and_sending_share_it() -> None:
    # Alone the gather takes 4 seconds, of which half the processor; computing takes all of it.
    cluster = two_queues(processor_bytes_per_s=2.0)
    both = on_both(gather("g", 4), compute("c", 2))
    # At 2/3 of its rate each until 3; then 2 of the 4 seconds of the gather are left.
    assert spans(simulate(both, cluster)) == {"g": (0, 5), "c": (0, 3)}
    assert spans(simulate(both, two_queues())) == {"g": (0, 4), "c": (0, 2)}
    one_by_one = on_both(gather("g", 4), compute("c", 2, "g"))
    assert spans(simulate(one_by_one, cluster)) == {"g": (0, 4), "c": (4, 6)}
    # A processor that is slower than the link decides, and computing waits for its half of it.
    slow = two_queues(processor_bytes_per_s=0.5)
    assert spans(simulate(both, slow)) == {"g": (0, 10), "c": (0, 4)}


def test_half_duplex_adds_both_directions() -> None:
    one = on_both(gather("g", 3))
    assert simulate(one, two_queues(full_duplex=False)).makespan_s == 6


def test_latency_counts_steps_and_uses_no_bandwidth() -> None:
    ranks = dict.fromkeys(range(4), (gather("g", 2), reduce("r", 8)))
    timeline = simulate(ranks, two_queues(ranks=4, latency_s=0.5))
    # Three steps each; then both move 6 bytes over one rail.
    assert spans(timeline) == {"g": (0, 13.5), "r": (0, 13.5)}
    direct = simulate(ranks, two_queues(ranks=4, latency_s=0.5, algorithm="direct"))
    assert direct.makespan_s == 12.5


def test_in_network_reduction_lets_gather_and_reduce_pass_each_other() -> None:
    ranks = dict.fromkeys(range(8), (gather("g", 8), reduce("r", 64)))
    alone = 56.0
    assert simulate(ranks, two_queues(ranks=8)).makespan_s == pytest.approx(2 * alone)
    together = simulate(ranks, two_queues(ranks=8, algorithm="in_network")).makespan_s
    assert together == pytest.approx(alone * (1 + 1 / 7))


def test_a_collective_begins_when_the_last_member_comes() -> None:
    programs = {0: [gather("g", 3)], 1: [compute("late", 2), gather("g", 3, "late")]}
    timeline = simulate(programs, two_queues())
    first = timeline.time("g", 0)
    assert (first.ready_s, first.start_s, first.stop_s) == (0, 2, 5)
    path = [(t.rank, t.name) for t in timeline.critical_path()]
    assert path in ([(1, "late"), (0, "g")], [(1, "late"), (1, "g")])


def test_groups_of_one_cost_nothing() -> None:
    timeline = simulate({0: [gather("g", 3), reduce("r", 9)]}, two_queues(ranks=1, latency_s=1.0))
    assert timeline.makespan_s == 0


def test_a_straggler_splits_off_its_own_group_only() -> None:
    groups = tuple((i, i + 1) for i in range(0, 1024, 2))
    cluster = Cluster([Rail("a", 1.0)], [SimulatedCommunicator(GATHER, "a", groups)])
    usual, slow = ((compute("c", s), gather("g", 1, "c"), compute("d", s, "g")) for s in (1.0, 3.0))
    timeline = simulate(dict.fromkeys(range(1024), usual) | {7: slow}, cluster)
    assert timeline.num_rank_classes == 3
    assert [timeline.time("d", rank).stop_s for rank in (0, 6, 7, 8)] == [3, 5, 7, 3]


def test_being_unlike_spreads_from_group_to_group() -> None:
    """Ranks 0-7 in pairs, and the same ranks in pairs shifted by one: a chain of eight."""
    pairs = tuple((i, i + 1) for i in range(0, 8, 2))
    shifted = ((0,), (1, 2), (3, 4), (5, 6), (7,))
    cluster = Cluster(
        [Rail("a", 1.0)],
        [SimulatedCommunicator(GATHER, "a", pairs), SimulatedCommunicator(REDUCE, "a", shifted)],
    )
    usual, slow = (
        (compute("c", s), gather("g", 1, "c"), reduce("r", 2, "g"), gather("h", 1, "r"))
        for s in (1.0, 3.0)
    )
    timeline = simulate(dict.fromkeys(range(8), usual) | {3: slow}, cluster)
    alone = simulate(dict.fromkeys(range(8), usual) | {3: slow}, cluster, collapse=False)
    assert [timeline.time("h", r).stop_s for r in range(8)] == [6, 6, 6, 6, 6, 6, 4, 4]
    assert spans(timeline, 5) == spans(alone, 5)
    assert simulate(dict.fromkeys(range(8), usual), cluster).num_rank_classes == 4


def test_the_source_of_a_broadcast_is_told_apart() -> None:
    task = Task("b", GATHER, "broadcast", num_bytes=4, source=1)
    every = dict.fromkeys(range(3), (task,))
    timeline = simulate(every, two_queues(ranks=3, algorithm="direct"))
    assert timeline.makespan_s == 8
    assert [timeline.events(rank)[0].bytes for rank in range(3)] == [0, 8, 0]


def test_events_go_to_the_trace() -> None:
    timeline = simulate(on_both(gather("g", 3), compute("f", 1), reduce("r", 8)), two_queues("b"))
    event = timeline.events(1)[0]
    assert (event.group, event.role, event.operation) == ("dp", "gather", "all_gather g")
    assert (event.rank, event.queue, event.bytes, event.stop_s) == (1, GATHER, 3, 3)
    assert overlap_fraction(timeline.events(0), a=GATHER, b=REDUCE) == 1.0
    slices = [e for e in chrome_trace(timeline.events(0))["traceEvents"] if e["ph"] == "X"]
    assert {e["name"]: e["dur"] for e in slices} == {
        "all_gather g": 3e6,
        "f": 1e6,
        "reduce_scatter r": 4e6,
    }
    assert json.dumps(slices)


def test_the_description_says_that_it_is_a_prediction() -> None:
    text = simulate(on_both(gather("g", 3)), two_queues()).describe()
    assert text.splitlines()[0] == "predicted makespan  3000.000 ms, 2 ranks"
    assert "ranks 0-1" in text
    assert "rank 0 dp:gather" in text.splitlines()[-1]


def test_other_order_on_one_queue_is_a_deadlock_that_names_both_ranks() -> None:
    programs = {
        0: [gather("x", 1), gather("g1", 1), gather("g0", 1)],
        1: [gather("x", 1), gather("g0", 1), gather("g1", 1), compute("f", 1, "g1")],
    }
    with pytest.raises(DeadlockError) as caught:
        simulate(programs, two_queues())
    text = str(caught.value)
    assert "rank 0 on 'dp:gather' at 'g1': waits for rank 1, held elsewhere" in text
    assert "rank 1 on 'dp:gather' at 'g0': waits for rank 0, held elsewhere" in text
    assert "rank 1 on 'compute' at 'f': waits for its own 'g1'" in text
    assert "part at collective 1: rank 0 issues 'g1', rank 1 'g0'" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_the_earliest_place_where_orders_part_is_named() -> None:
    programs = {
        0: [gather("x", 1), gather("g1", 1), gather("g0", 1), reduce("r1", 2), reduce("r0", 2)],
        1: [gather("x", 1), gather("g0", 1), gather("g1", 1), reduce("r0", 2), reduce("r1", 2)],
    }
    for order in (programs, {rank: tasks[3:] + tasks[:3] for rank, tasks in programs.items()}):
        with pytest.raises(DeadlockError, match="part at collective 0: "):
            simulate(order, two_queues())


def test_a_collective_that_one_rank_leaves_out_is_a_deadlock() -> None:
    programs = {0: [gather("g", 1), reduce("r", 2)], 1: [gather("g", 1)]}
    with pytest.raises(DeadlockError, match=r"'r': waits for rank 1, without such a task") as e:
        simulate(programs, two_queues())
    assert "part at collective 0: rank 0 issues 'r', rank 1 nothing more" in str(e.value)


def test_a_circle_over_two_queues_is_a_deadlock_although_orders_agree() -> None:
    programs = {0: [gather("g", 1), reduce("r", 2, "g")], 1: [reduce("r", 2), gather("g", 1, "r")]}
    with pytest.raises(DeadlockError, match="tasks wait in a circle: ") as caught:
        simulate(programs, two_queues())
    assert "'g' of rank 1 -> 'r' of rank 1 -> 'r' of rank 0 -> 'g' of rank 0" in str(caught.value)


def test_a_rank_that_waits_for_itself_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="'a' of rank 0 -> 'b' of rank 0 -> 'a' of rank 0"):
        simulate({0: [compute("a", 1, "b"), compute("b", 1)]}, two_queues())


def test_a_deadlock_of_many_ranks_is_told_in_few_lines() -> None:
    programs = {r: [gather("g", 1)] for r in range(63)} | {63: [compute("f", 1)]}
    with pytest.raises(DeadlockError, match=r"ranks 0-62 on 'dp:gather' at 'g': waits for rank 63"):
        simulate(programs, two_queues(ranks=64))


@pytest.mark.parametrize(
    ("programs", "error", "match"),
    [
        ({0: [compute("a", 1), compute("a", 1)]}, ConfigError, "two tasks named 'a'"),
        ({0: [compute("ab", 1), compute("b", 1, "aa")]}, ConfigError, "Known here: 'ab', 'b'"),
        ({0: [gather("g", 1, queue="dp:gathr")]}, ConfigError, "mean 'dp:gather'"),
        ({2: [gather("g", 1)]}, TopologyError, "rank 2.*\n?.*none of its groups"),
        ({0: [gather("g", 1)]}, TopologyError, r"no program for ranks \[1\]"),
        ({0: [reduce("r", 1)], 1: [reduce("r", 2)]}, DivergenceError, "1 bytes"),
        (
            {0: [gather("r", 1, queue=REDUCE)], 1: [reduce("r", 1)]},
            DivergenceError,
            "reduce_scatter of 1 bytes",
        ),
        (
            on_both(Task("b", GATHER, "broadcast", num_bytes=1, source=2)),
            ConfigError,
            "Use 0 to 1",
        ),
    ],
)
def test_programs_that_do_not_fit_are_refused(
    programs: dict[int, list[Task]], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        simulate(programs, two_queues())


def test_a_question_about_nothing_is_refused() -> None:
    timeline = simulate(on_both(gather("g", 1)), two_queues())
    with pytest.raises(ConfigError, match="mean 'g'"):
        timeline.time("gg")
    with pytest.raises(ConfigError, match="ranks 0-1 were simulated"):
        timeline.times(2)
    with pytest.raises(ConfigError, match="mean 'dp:gather'"):
        timeline.busy_s("dp:gathers")


def test_opposite_orders_on_two_communicators_finish_here_but_not_on_one_device() -> None:
    programs = {0: [gather("g", 1), reduce("r", 2)], 1: [reduce("r", 2), gather("g", 1)]}
    assert simulate(programs, two_queues("b")).makespan_s == 1
    match = "'g' on 'dp:gather' comes before 'r' on 'dp:reduce' on rank 0, after it on rank 1"
    with pytest.raises(DivergenceError, match=match):
        check_issue_order(programs, two_queues())


def test_the_first_pair_is_named() -> None:
    same = [gather("g0", 1), reduce("r0", 2)]
    one = [*same, gather("g1", 1), reduce("r1", 2), gather("g2", 1), reduce("r2", 2)]
    other = [*same, reduce("r1", 2), gather("g1", 1), reduce("r2", 2), gather("g2", 1)]
    with pytest.raises(
        DivergenceError, match="'g1' on 'dp:gather' comes before 'r1' on 'dp:reduce'"
    ):
        check_issue_order({0: one, 1: other}, two_queues())
    check_issue_order({0: one, 1: one}, two_queues())


def test_an_order_that_only_three_ranks_break_is_found() -> None:
    groups = {"x": (0, 2), "y": (0, 1), "z": (1, 2)}
    cluster = Cluster(
        [Rail("a", 1.0)], [SimulatedCommunicator(q, "a", (g,)) for q, g in groups.items()]
    )
    orders = {0: "xy", 1: "yz", 2: "zx"}
    programs = {r: [gather(q, 1, queue=q) for q in order] for r, order in orders.items()}
    with pytest.raises(DivergenceError, match="waits for the next: 'x' on 'x' on rank 0"):
        check_issue_order(programs, cluster)
    programs[2].reverse()
    check_issue_order(programs, cluster)


def test_a_missing_collective_breaks_the_order() -> None:
    programs = {0: [gather("g", 1)], 1: [compute("f", 1)]}
    with pytest.raises(DivergenceError, match="program of rank 0, not of rank 1"):
        check_issue_order(programs, two_queues())
