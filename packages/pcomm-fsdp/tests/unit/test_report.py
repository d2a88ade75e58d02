"""The figures of a report where they can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_support import schedules as without_model
from fsdp_support.trainings import Block, SmallModel
from pcomm.core.groups.group import Group
from pcomm.core.simulate.program import Rail
from pcomm.core.trace.events import Event
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.compute_costs import Costs
from pcomm.fsdp.plan.group_plan import FlatLayout, GroupPlan
from pcomm.fsdp.report import Overlap, ideal_bytes, report_of
from pcomm.fsdp.runtime.schedule import Operation, Schedule
from pcomm.fsdp.settings import Precision, ReshardPolicy, Roles

ALONE = Roles(Group("dp", (0,), None), Group("dp", (0,), None))


def plan_of(
    reshard: ReshardPolicy, *, num_replicas: int = 1, is_trainable: bool = True
) -> GroupPlan:
    """100 parameters in 120 places of 4 ranks: bf16 on the wire, fp32 gradients."""
    everyone = (0, 1, 2, 3)
    roles = Roles(
        Group("dp", everyone, None, role="gather"),
        Group("dp", everyone, None, role="reduce"),
        Group("rep", tuple(range(num_replicas)), None) if num_replicas > 1 else None,
    )
    return replace(
        without_model.plan_of("a", roles, reshard=reshard),
        param_dtype=torch.bfloat16,
        is_trainable=is_trainable,
        layout=FlatLayout(((100,),), (0,), 30, 4, True),
    )


@pytest.mark.parametrize(
    ("reshard", "gathers", "reduces"),
    [
        (ReshardPolicy.zero3(), 6, 3),
        (ReshardPolicy.zero3(reduce="step"), 6, 1),
        (ReshardPolicy("backward", "micro_batch"), 3, 3),
        (ReshardPolicy.zero2(), 1, 3),
        (ReshardPolicy.zero1(), 1, 1),
    ],
)
def test_the_formula(reshard: ReshardPolicy, gathers: int, reduces: int) -> None:
    """Reference: (N-1)/N P b; 2k, k or 1 gathers; k or 1 reduces; 2 (M-1)/M P/N b."""
    ideal = ideal_bytes([plan_of(reshard, num_replicas=2)], 3)
    assert ideal == {
        "gather": gathers * 75 * 2,
        "reduce": reduces * 75 * 4,
        "replicate": 2 * 0.5 * 25 * 4,
    }
    frozen = ideal_bytes([plan_of(reshard, is_trainable=False)], 3)
    assert frozen == {"gather": gathers * 150, "reduce": 0, "replicate": 0}


FORWARD = "gather a.w, wait_gather a.w, use a, done a"
BACKWARD = "use a, done a, release a.w, reduce a.w, end a, wait_reduce a.w, all_reduce a.w, "
BACKWARD += "wait_all_reduce a.w"


def schedule() -> Schedule:
    return Schedule(
        tuple(
            Operation(*words.split(), phase)  # type: ignore[arg-type]
            for phase, text in (("forward", FORWARD), ("backward", BACKWARD))
            for words in text.split(", ")
        ),
        frozenset(),
    )


def test_a_step_by_hand() -> None:
    plan = plan_of(ReshardPolicy.zero3(), num_replicas=2)
    report = report_of(
        "plans",
        [schedule()],
        [plan],
        link=Rail("nic", 10.0, 1.0),
        costs=Costs({"a": 5.0}, {"a": 7.0}),
        step_s=200.0,
    )
    # 90 elements of bf16 out, 90 of fp32, and the 30 of the shard once there and back.
    assert report.sent == {"gather": 180, "reduce": 360, "replicate": 120}
    assert report.padding == pytest.approx(20 / 120)
    assert report.limits is not None
    assert report.limits.independent_s == pytest.approx((18 + 1) + 12 + (36 + 1) + (12 + 1))
    assert report.limits.one_link_s == report.limits.independent_s
    assert report.ratios == {"one link": 81 / 200, "independent links": 81 / 200}
    assert report.memory is not None
    assert report.memory.by_kind == {
        "shards": 120,
        "gathered": 240,
        "gradients": 480,
        "shard gradients": 120,
    }
    # In backward all but the gradient of the shard; that comes when parameters are gone.
    assert report.memory.at_once == 120 + 240 + 480
    text = str(report)
    assert text.startswith("plans\npadding 16.67%")
    for line in (
        "gather           180 bytes, formula 300 bytes less 150 bytes that stay gathered\n",
        "81000.000 ms, 0.41 of the",
    ):
        assert line in text


def test_latencies_on_one_link_may_overlap() -> None:
    """The sum of all bytes is a bound there, that of all latencies is none."""
    report = report_of(
        "", [schedule()], [plan_of(ReshardPolicy.zero3())], link=Rail("nic", 1e12, 1.0)
    )
    assert report.limits is not None
    assert report.limits.one_link_s == pytest.approx(report.limits.independent_s)


def event(queue: str, start_s: float, stop_s: float, *, blocks: bool = False) -> Event:
    group, _, role = queue.partition(":")
    if queue in ("compute", "wait"):
        group = ""
    return Event(group, role, "x", 0, start_s, stop_s, 0, queue, blocks=blocks)


def test_the_share_that_is_hidden_is_that_of_intervals() -> None:
    events = [
        event("compute", 0, 10),
        event("dp:gather", 1, 5),
        event("dp:reduce", 4, 12),
        event("wait", 7, 8, blocks=True),
    ]
    report = report_of("", [], [plan_of(ReshardPolicy.zero3())], events=events)
    # On its way from 1 to 12; not computed from 7 to 8 and from 10 on. Both from 4 to 5.
    assert report.overlap == Overlap(pytest.approx(8 / 11), pytest.approx(1 / 4))
    assert "hidden behind computing 72.7%" in str(report)
    only = report_of("", [], [plan_of(ReshardPolicy.zero3())], events=events[:2])
    assert only.overlap == Overlap(1.0, None)


def test_one_rank_moves_nothing_and_holds_little() -> None:
    model = SmallModel()
    sharded = fully_shard(model, ALONE, units=[Block], precision=Precision(torch.bfloat16))
    assert sharded.report().sent is None
    model.loss(torch.tensor([[1, 2, 3]])).backward()
    report = sharded.report(link=Rail("nic", 1e9))
    assert report.sent == {"gather": 0, "reduce": 0, "replicate": 0}
    assert report.limits is not None
    assert report.limits.one_link_s == 0
    assert report.memory is not None
    assert report.memory.by_kind["gathered"] > 0
    alone = fully_shard(SmallModel(), ALONE, units=[Block]).report()
    assert alone.sent is None
    assert "padding 0.00%" in str(alone)
