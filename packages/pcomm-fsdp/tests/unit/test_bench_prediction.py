"""Predictions of the benchmark beside closed forms, with costs made by hand."""

from __future__ import annotations

import pytest
import torch

from core_bench.runner import Timing
from fsdp_bench.measure import FsdpResult
from fsdp_bench.predictions import (
    Prediction,
    StepWork,
    cluster_of,
    costs_of_ranks,
    latency_of,
    median_costs,
    recorded_costs,
    step_s,
)
from fsdp_bench.report import rows_of, tables_of
from fsdp_bench.settings import (
    CHANGES,
    FSDP2,
    ONE,
    OURS,
    THEIRS,
    TWO,
    TWO_RAILS,
    LinkRate,
    Settings,
)
from fsdp_support.schedules import chain, chain_costs, plan_of, step_of
from fsdp_support.trainings import Block, SmallModel
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.group import Group
from pcomm.core.simulate.program import Cluster
from pcomm.core.testing.virtual import run_virtual
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.compute_costs import Costs
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import Schedule
from pcomm.fsdp.settings import Precision, Roles

UNITS, RANKS, RATE = 6, 4, 1000.0
# Of one gather, or of one reduce: 3 of 4 shards of 160 fp32 numbers.
BYTES = 3 * 160 * 4
MOVE_S = BYTES / RATE
# One unit is gathered ahead, so the last two stay from forward to backward.
AGAIN = UNITS - 2

EVERYONE = tuple(range(RANKS))
CASES = (ONE, TWO, TWO_RAILS)


def group(role: str, rail: int) -> Group:
    return Group("dp", EVERYONE, None, role=role, granted={"interface": f"rail{rail}"})


def roles_of(case: str) -> Roles:
    gather = group("gather", 0)
    others = {ONE: gather, TWO: group("reduce", 0), TWO_RAILS: group("other rail", 1)}
    return Roles(gather, others[case])


def planned_step(case: str, inflight: int = 1) -> tuple[list[Schedule], list[GroupPlan]]:
    """Equal units in a row, as the benchmark has them."""
    plans = [plan_of(f"b{i}", roles_of(case), elements=640) for i in range(UNITS)]
    return step_of(chain(UNITS), plans, inflight=inflight), plans


def costs_of(forward_s: float, backward_s: float) -> Costs:
    return chain_costs(UNITS, forward_s, backward_s)


def predicted(case: str, *costs: Costs, latency_s: float = 0.0, inflight: int = 1) -> float:
    schedules, plans = planned_step(case, inflight)
    every = costs * RANKS if len(costs) == 1 else costs
    return step_s(schedules, plans, every, cluster_of(plans, RATE, latency_s))


INFLIGHT = pytest.mark.parametrize("inflight", [1, 2])


@INFLIGHT
@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_one_group_that_only_communicates_takes_the_sum_of_all(
    latency_s: float, inflight: int
) -> None:
    expected = (UNITS + AGAIN + UNITS) * (MOVE_S + latency_s)
    found = predicted(ONE, costs_of(0, 0), latency_s=latency_s, inflight=inflight)
    assert found == pytest.approx(expected)


@INFLIGHT
def test_two_groups_on_one_rail_share_its_rate(inflight: int) -> None:
    """Bytes are as many as with one group, and the link is never idle."""
    expected = (UNITS + AGAIN + UNITS) * MOVE_S
    assert predicted(TWO, costs_of(0, 0), inflight=inflight) == pytest.approx(expected)


@INFLIGHT
@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_two_rails_hide_the_shorter_of_gathers_and_reduces(latency_s: float, inflight: int) -> None:
    """In forward there are gathers alone; in backward as many reduces as units, and fewer gathers.

    The second gather of backward is done when the second reduce begins, so none of them is late.
    """
    assert AGAIN < UNITS
    expected = (UNITS + UNITS) * (MOVE_S + latency_s)
    found = predicted(TWO_RAILS, costs_of(0, 0), latency_s=latency_s, inflight=inflight)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
def test_where_computing_takes_longer_only_the_ends_are_seen(case: str) -> None:
    """A unit computes longer than its gather and reduce take, with others on the link or alone."""
    forward_s, backward_s, latency_s = 2.5 * MOVE_S + 1, 3 * MOVE_S + 2, 0.25
    found = predicted(case, costs_of(forward_s, backward_s), latency_s=latency_s)
    ends = 2 * (MOVE_S + latency_s)
    assert found == pytest.approx(ends + UNITS * (forward_s + backward_s))


def test_the_others_wait_for_the_slowest_rank() -> None:
    slow, fast = costs_of(20.0, 40.0), costs_of(1.0, 2.0)
    expected = 2 * MOVE_S + UNITS * 60.0
    assert predicted(ONE, fast, slow, fast, fast) == pytest.approx(expected)
    assert predicted(ONE, slow) == pytest.approx(expected)


def rails_of(cluster: Cluster) -> dict[str, str]:
    return {one.queue: one.rail for one in cluster.communicators}


def test_communicators_are_on_the_rails_of_their_interfaces() -> None:
    clusters = {case: cluster_of(planned_step(case)[1], RATE, 0.5) for case in CASES}
    assert rails_of(clusters[ONE]) == {"dp:gather": "rail0"}
    assert rails_of(clusters[TWO]) == {"dp:gather": "rail0", "dp:reduce": "rail0"}
    assert rails_of(clusters[TWO_RAILS]) == {"dp:gather": "rail0", "dp:other rail": "rail1"}
    assert [len(clusters[case].rails) for case in CASES] == [1, 1, 2]
    for cluster in clusters.values():
        assert {(rail.bytes_per_s, rail.latency_s) for rail in cluster.rails} == {(RATE, 0.5)}
        assert {one.groups for one in cluster.communicators} == {(EVERYONE,)}


def test_the_latency_is_what_bytes_do_not_explain() -> None:
    def latency(alone_s: float) -> float:
        return latency_of(alone_s, num_bytes=3000.0, num_operations=4, bytes_per_s=1000.0)

    assert latency(5.0) == pytest.approx(0.5)
    # A burst may pass faster than the rate of the link.
    assert latency(2.9) == 0.0


def test_of_several_steps_each_unit_has_its_median() -> None:
    steps = [
        Costs({"a": 1.0, "b": 9.0}, {"a": 5.0}),
        Costs({"a": 2.0, "b": 3.0}, {"a": 50.0}),
        Costs({"a": 30.0, "b": 4.0}, {"a": 6.0}),
    ]
    assert median_costs(steps) == Costs({"a": 2.0, "b": 4.0}, {"a": 6.0})


def test_each_rank_tells_the_others_its_costs() -> None:
    own = [Costs({"a": r + 1.0, "b": 0.1}, {"b": 3.0 * r}) for r in range(3)]

    def tell(control: Collectives) -> list[Costs]:
        return costs_of_ranks(own[control.rank], control)

    assert run_virtual(tell, 3) == [own] * 3


def test_recorded_costs_are_those_of_every_unit_that_computes() -> None:
    alone = Group("dp", (0,), None)
    model = SmallModel(num_blocks=2)
    # One rank that converts has a schedule; one that does not is left alone.
    precision = Precision(torch.bfloat16)
    sharded = fully_shard(model, Roles(alone, alone), units=[Block], precision=precision)
    calls = []

    def step() -> None:
        calls.append(0)
        model.loss(torch.tensor([[1, 2, 3]])).backward()

    step()
    (costs,) = recorded_costs(sharded, step, 3, alone.collectives)
    assert len(calls) == 4
    units = {ROOT, "blocks.0", "blocks.1"}
    assert set(costs.forward_s) == set(costs.backward_s) == units
    assert all(s > 0 for each in (costs.forward_s, costs.backward_s) for s in each.values())


def timed(case: str, *rounds_us: float) -> Timing:
    return Timing(case, rounds_us)


def test_predictions_are_rows_and_a_table_of_their_own() -> None:
    timings = {case: timed(case, 90.0, 100.0, 120.0) for case in (*THEIRS, *OURS)}
    prediction = Prediction(3e-6, 40e-6, {ONE: 80e-6, TWO: 60e-6, TWO_RAILS: 110e-6})
    found = FsdpResult("linear", 2, timings, prediction=prediction)
    values = {(row.case, row.unit): row.value for row in rows_of([found])}
    at = "@ 2 ranks, linear"
    assert values[f"{ONE} {at}", "ms, predicted"] == 0.08
    assert values[f"{ONE} {at}", "predicted / measured"] == 0.8
    assert values[f"{TWO} {at}", "predicted / measured"] == 0.6
    assert values[f"{TWO_RAILS} {at}", "predicted / measured"] == 1.1
    assert values[f"computing of the slowest rank {at}", "ms, in the prediction"] == 0.04
    assert values[f"a collective beyond its bytes {at}", "ms, in the prediction"] == 0.003
    measured, _, told = tables_of(Settings(), [found]).partition("PREDICTION of a model")
    assert "predicted" not in measured
    assert "not measured" in told
    assert "predicted / measured:" in told


def test_a_row_says_what_each_change_is_worth_in_the_same_round() -> None:
    """Rounds differ twofold, and the later form takes a tenth less in each."""
    timings = {change.after: timed(change.after, *(90.0, 180.0, 45.0)) for change in CHANGES} | {
        FSDP2: timed(FSDP2, 100.0, 200.0, 50.0)
    }
    link = LinkRate(2000.0, 4)
    values = {
        (r.case, r.unit): r.value for r in rows_of([FsdpResult("linear", 4, timings, link=link)])
    }
    at = "@ 4 ranks, linear, 2 Gbit/s, batch x4"
    gains = {
        change.name: values[f"{change.name} {at}", "x as fast, by one change"]
        for change in CHANGES
        if {change.after, change.before} <= timings.keys()
    }
    first, *others = gains.values()
    assert first == pytest.approx(1.111)
    assert set(others) == {1.0}
    assert values[f"{ONE} over {FSDP2} {at}", "x as fast"] == pytest.approx(1.111)


def test_forms_that_were_left_out_have_no_rows() -> None:
    timings = {case: timed(case, 1.0, 2.0, 3.0) for case in (FSDP2, TWO)}
    found = FsdpResult("linear", 2, timings)
    cases = {row.case.split(" @ ")[0] for row in rows_of([found])}
    assert cases == {FSDP2, TWO, f"{TWO} over {FSDP2}"}


def test_computing_is_compared_with_what_is_sent_at_the_rate_of_the_link() -> None:
    """4 units of 1 MB, all gathered twice and reduced once, half of it sent: 6 MB at 1 MB/s."""
    step = StepWork([1_000_000] * 4, 2, 4, 1.0, 2.0)
    kept = StepWork([1_000_000] * 4, 2, 2, 1.0, 2.0)
    timings = {case: timed(case, 1e6) for case in (FSDP2, TWO)}
    found = FsdpResult(
        "linear",
        2,
        timings,
        sent_bytes={FSDP2: 6e6, TWO: 5e6},
        steps={FSDP2: step, TWO: kept},
        link=LinkRate(8.0),
    )
    values = {(row.case, row.unit): row.value for row in rows_of([found])}
    at = "@ 2 ranks, linear, 8 Mbit/s, batch x1"
    assert values[f"computing / sending {at}", "where 1 hides all"] == 0.5
    assert values[f"{TWO} {at}", "of its ideal bytes"] == 1.0
