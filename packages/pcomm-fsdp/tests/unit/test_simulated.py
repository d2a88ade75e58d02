"""Schedules in virtual time: no deadlock, who waits for whom, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.predictions import StepWork, lower_bounds_s
from fsdp_support import schedules as without_model
from fsdp_support.schedules import ChainGroup, chain, chain_costs, random_events, step_of
from fsdp_support.trainings import STRATEGIES
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.simulate.deadlock import check_issue_order
from pcomm.core.simulate.engine import Timeline, simulate
from pcomm.core.simulate.program import Cluster, Rail, SimulatedCommunicator, Task
from pcomm.core.trace.recording import Recorder
from pcomm.fsdp.compute_costs import ComputeRecorder, Costs, compute_segments, program, queues_of
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.report import limits_of
from pcomm.fsdp.runtime.schedule import Schedule
from pcomm.fsdp.settings import ReshardPolicy, Roles


def plan_of(
    unit: str,
    num_ranks: int,
    *,
    elements: int = 640,
    separate: bool = True,
    reshard: ReshardPolicy = STRATEGIES["zero3"],
    reduce_dtype: torch.dtype = torch.float32,
    num_replicas: int = 1,
) -> GroupPlan:
    """A plan on all ranks, with communicators of its own or one for both."""
    ranks = tuple(range(num_ranks))
    gather = Group("dp", ranks, None, role="gather")
    roles = Roles(
        gather,
        Group("dp", ranks, None, role="reduce") if separate else gather,
        Group("rep", tuple(range(num_replicas)), None) if num_replicas > 1 else None,
    )
    return without_model.plan_of(
        unit, roles, elements=elements, reshard=reshard, reduce_dtype=reduce_dtype
    )


def cluster_of(num_ranks: int, *, num_rails: int = 1, latency_s: float = 0.0) -> Cluster:
    everyone = (tuple(range(num_ranks)),)
    return Cluster(
        [Rail(f"rail{i}", 1e3, latency_s) for i in range(num_rails)],
        [
            SimulatedCommunicator("dp:gather", "rail0", everyone),
            SimulatedCommunicator("dp:reduce", f"rail{num_rails - 1}", everyone),
        ],
    )


def simulated(tasks: list[Task], num_ranks: int, *, num_rails: int = 1) -> Timeline:
    cluster = cluster_of(num_ranks, num_rails=num_rails)
    programs = dict.fromkeys(range(num_ranks), tasks)
    check_issue_order(programs, cluster)
    return simulate(programs, cluster)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Schedule], list[GroupPlan], Costs]:
    """A random step of a random model."""
    events = draw(random_events())
    num_ranks = draw(st.integers(2, 64))
    separate = draw(st.booleans())
    units = sorted({event.unit for event in events})
    plans = [
        plan_of(
            unit,
            num_ranks,
            elements=draw(st.sampled_from([1, 300, 5000])),
            separate=separate,
            reshard=STRATEGIES[draw(st.sampled_from(sorted(STRATEGIES)))],
        )
        for unit in units
    ]
    schedules = step_of(
        events,
        plans,
        micro_batches=draw(st.integers(1, 2)),
        prefetch=draw(st.integers(0, 4)),
        inflight=draw(st.integers(1, 3)),
    )
    seconds = st.sampled_from([0.0, 0.5, 3.0])
    costs = Costs({u: draw(seconds) for u in units}, {u: draw(seconds) for u in units})
    return schedules, plans, costs


@given(steps())
@settings(max_examples=60)
def test_random_models_run_without_deadlock_and_not_faster_than_they_can(
    step: tuple[list[Schedule], list[GroupPlan], Costs],
) -> None:
    schedules, plans, costs = step
    tasks = program(schedules, plans, costs)
    num_ranks = plans[0].gather.size
    collectives = [task for task in tasks if task.is_collective]
    issued = sum(s.count("gather") + s.count("reduce") for s in schedules)
    assert len(collectives) == issued
    computed = sum(sum(compute_segments(schedule, costs).values()) for schedule in schedules)
    assert sum(task.seconds for task in tasks) == pytest.approx(computed)
    limits = limits_of(schedules, plans, Rail("any", 1e3), costs)
    one = simulated(tasks, num_ranks).makespan_s
    two = simulated(tasks, num_ranks, num_rails=2).makespan_s
    assert one >= limits.one_link_s - 1e-9
    assert two >= limits.independent_s - 1e-9
    assert two <= one + 1e-9
    apart, together = (
        program(schedules, [plan_of_same(plan, separate=separate) for plan in plans], costs)
        for separate in (True, False)
    )
    # Links of their own are never slower than one communicator.
    of_one = simulated(together, num_ranks).makespan_s
    assert simulated(apart, num_ranks, num_rails=2).makespan_s <= of_one + 1e-9


def plan_of_same(plan: GroupPlan, *, separate: bool) -> GroupPlan:
    reduce = Group("dp", plan.gather.ranks, None, role="reduce")
    return replace(plan, reduce=reduce if separate else plan.gather)


@pytest.mark.parametrize("num_ranks", [64, 512])
@pytest.mark.parametrize("num_rails", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("separate", [False, True])
def test_the_first_gather_behind_a_reduce_starts_before_its_end_iff_the_roles_differ(
    separate: bool, prefetch: int, num_rails: int, num_ranks: int
) -> None:
    """Reduces take eight times a gather and their number is not limited.

    When unit i ends in backward, the gather of i - 1 - prefetch is issued before its reduce, and
    overtakes it on any communicator. The gather after it, of i - 2 - prefetch, is issued when unit
    i - 1 ends: it stands behind the reduce unless that is on a communicator of its own.
    """
    units = 12
    plans = [plan_of(f"b{i}", num_ranks, elements=5120, separate=separate) for i in range(units)]
    # Wide gradients stand for a slow reduce.
    plans = [replace(p, param_dtype=torch.uint8, reduce_dtype=torch.float64) for p in plans]
    schedules = step_of(chain(units), plans, prefetch=prefetch, inflight=units)
    tasks = program(schedules, plans, chain_costs(units, 1e-3, 1e-3))
    timeline = simulated(tasks, num_ranks, num_rails=num_rails)
    for i in range(2 + prefetch, units):
        reduce = timeline.time(f"backward reduce b{i}.w")
        before = timeline.time(f"backward gather b{i - 1 - prefetch}.w")
        behind = timeline.time(f"backward gather b{i - 2 - prefetch}.w")
        assert before.start_s < reduce.stop_s
        assert (behind.start_s < reduce.stop_s) == separate
        if not separate:
            assert before.stop_s <= reduce.start_s


@pytest.mark.parametrize("compute_s", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_second_communicator_on_the_same_rail_needs_prefetch(
    prefetch: int, compute_s: float
) -> None:
    """With a rail of its own it is never slower; on the same rail, only without prefetch.

    There the next unit waits for its gather, which one communicator sends alone, before the
    reduce, while two share the rail between them.
    """
    units, num_ranks = 10, 64
    times = {}
    for separate in (True, False):
        plans = [plan_of(f"b{i}", num_ranks, separate=separate) for i in range(units)]
        schedules = step_of(chain(units), plans, prefetch=prefetch)
        costs = chain_costs(units, compute_s, 2 * compute_s)
        tasks = program(schedules, plans, costs)
        for num_rails in (1, 2):
            times[separate, num_rails] = simulated(tasks, num_ranks, num_rails=num_rails).makespan_s
        limits = limits_of(schedules, plans, Rail("any", 1e3), costs)
        assert times[separate, 1] >= limits.one_link_s - 1e-9
        assert times[separate, 2] >= limits.independent_s - 1e-9
    assert times[True, 2] <= times[True, 1] + 1e-9
    is_slower = prefetch == 0 and compute_s > 0
    assert (times[True, 1] > times[False, 1] + 1e-9) == is_slower
    assert times[False, 1] == pytest.approx(times[False, 2])


@given(
    st.integers(1, 9),
    st.integers(2, 64),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3, 2.0, 9.0]),
    st.sampled_from([0.0, 0.7, 5.0]),
)
def test_limits_of_equal_units_are_those_of_the_formula(
    units: int, num_ranks: int, prefetch: int, forward_s: float, backward_s: float
) -> None:
    plans = [plan_of(f"b{i}", num_ranks, elements=64 * num_ranks) for i in range(units)]
    schedules = step_of(chain(units), plans, prefetch=prefetch)
    limits = limits_of(
        schedules, plans, Rail("any", 1e3), chain_costs(units, forward_s, backward_s)
    )
    formula = StepWork(
        [plan.gathered_bytes for plan in plans],
        num_ranks,
        max(0, units - 1 - prefetch),
        units * forward_s,
        units * backward_s,
    )
    one_link, independent = lower_bounds_s(formula, 1e3)
    assert limits.one_link_s == pytest.approx(one_link)
    assert limits.independent_s == pytest.approx(independent)


def test_what_a_program_says() -> None:
    plans = [plan_of(f"b{i}", 4) for i in range(4)]
    schedules, costs = step_of(chain(4), plans), chain_costs(4, 1, 2)
    tasks = {task.name: task for task in program(schedules, plans, costs)}
    gather, reduce = tasks["forward gather b0.w"], tasks["backward reduce b0.w"]
    assert (gather.queue, gather.kind, gather.num_bytes) == ("dp:gather", "all_gather", 640)
    assert (reduce.queue, reduce.kind, reduce.num_bytes) == ("dp:reduce", "reduce_scatter", 2560)
    assert "forward gather b0.w" in tasks["forward b0"].after
    assert reduce.after == ("backward b0",)
    # Two reduces may be on their way; what comes behind the third waits for the first.
    assert "backward reduce b3.w" in tasks["backward b0"].after
    assert not any("reduce" in name for name in tasks["backward b1"].after)
    assert tasks["backward b0"].seconds == 2
    for shards in (1, 16):
        other = program(schedules, plans, costs, num_shards=shards)
        collectives = [task for task in other if task.is_collective]
        assert bool(collectives) == (shards > 1)
        assert all(t.num_bytes in (2560 / 16, 2560) for t in collectives)


def test_replicas_sum_after_their_reduce() -> None:
    plans = [plan_of("b0", 4, num_replicas=2)]
    tasks = {t.name: t for t in program(step_of(chain(1), plans), plans, chain_costs(1, 1, 2))}
    total = tasks["backward all_reduce b0.w"]
    assert (total.queue, total.kind, total.num_bytes) == ("rep", "all_reduce", 640)
    assert "backward reduce b0.w" in total.after


def test_groups_with_one_communicator_have_one_queue() -> None:
    plan = plan_of("b0", 4)
    assert queues_of([plan]) == {"dp[gather]": "dp:gather", "dp[reduce]": "dp:reduce"}
    ranks, communicator = plan.gather.ranks, object()
    gather, reduce = (
        ChainGroup("dp", ranks, communicator, role=role) for role in ("gather", "reduce")
    )
    shared = without_model.plan_of("b0", Roles(gather, reduce))
    assert set(queues_of([shared]).values()) == {"dp:gather"}


def test_costs_are_recorded_without_the_time_of_the_runtime() -> None:
    """A clock that counts: computing takes 1 a segment, the runtime 10 each time."""
    now = [0.0]
    recorder = Recorder(clock=lambda: now[0])
    compute = ComputeRecorder(recorder)
    events = chain(2)
    for _ in range(3):
        for event in events:
            now[0] += 1.0
            compute.pause(event)
            now[0] += 10.0
            compute.resume()
    (schedule,) = step_of(events, [plan_of(f"b{i}", 2) for i in range(2)])
    costs = Costs.from_events(recorder.events, schedule, 3)
    # The root computes before, between and behind its two units.
    expected = {ROOT: 3.0, "b0": 1.0, "b1": 1.0}
    assert costs == Costs(expected, expected)
    assert sum(compute_segments(schedule, costs).values()) == pytest.approx(10.0)


def test_what_a_failed_step_left_open_is_forgotten() -> None:
    recorder = Recorder(clock=iter(map(float, range(50))).__next__)
    compute = ComputeRecorder(recorder)
    for event in (*chain(1)[:2], *chain(1)):
        compute.pause(event)
        compute.resume()
    assert [event.operation for event in recorder.events].count("forward b0") == 1


def test_costs_that_are_missing_or_spread() -> None:
    with pytest.raises(ConfigError, match="'b1'"):
        Costs({"b0": 1.0}, {"b0": 1.0}).of("b1", "forward")
    (schedule,) = step_of(chain(3), [plan_of(f"b{i}", 2) for i in range(3)])
    even = Costs.even(schedule, forward_s=8.0, backward_s=4.0)
    assert sum(compute_segments(schedule, even).values()) == pytest.approx(12.0)
