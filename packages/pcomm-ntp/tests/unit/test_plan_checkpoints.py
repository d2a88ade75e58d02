"""Checkpoints of one plan read under another, by uniform runs, by one process, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from ntp_support.logical_state import LogicalState, state_units, unset
from pcomm.core import Layout, Topology
from pcomm.core.checkpoint import ShardLoadPlanner, ShardSavePlanner, ShardView
from pcomm.core.tensor_parallel import ParamLayout, take_shard
from pcomm.core.testing import assert_equal
from pcomm.ntp import Failures, NtpPlan, Policy, plan
from pcomm.ntp.redistribute import parameter_name, shard_views

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

UNITS = state_units(5)
WHOLE = LogicalState.random(UNITS)


def made(tp: int, degrees: Sequence[int], *, cp: int = 1, policy: Policy | None = None) -> NtpPlan:
    """A plan whose replicas have these degrees."""
    topology = Topology({"dp": len(degrees), "cp": cp, "tp": tp})
    down = [
        topology.rank({"dp": dp, "cp": 0, "tp": tp - 1 - i})
        for dp, degree in enumerate(degrees)
        for i in range(tp - degree)
    ]
    return plan(topology, Failures.from_global_ranks(down), UNITS, policy or Policy())


def views_of(plan: NtpPlan, *, is_unset: bool = False) -> dict[int, dict[str, ShardView]]:
    """The views of every rank that is left, of its shards or of memory to be filled."""
    found = {}
    for rank in plan.topology.ranks:
        if rank not in plan.topology.failed:
            shards = WHOLE.shards(plan, rank)
            shards = unset(shards) if is_unset else shards
            found[rank] = shard_views(plan, rank, shards, WHOLE.layouts(plan, rank))
    return found


def save(folder: Path, views: Sequence[Mapping[str, ShardView]]) -> None:
    """What `dcp.save` does on as many ranks, step by step in this process."""
    planners, writers = (
        [ShardSavePlanner() for _ in views],
        [FileSystemWriter(folder) for _ in views],
    )
    plans = []
    for rank, (own, planner, writer) in enumerate(zip(views, planners, writers, strict=True)):
        writer.set_up_storage_writer(rank == 0)
        planner.set_up_planner(dict(own), None, rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(own), planner).wait()
        for own, planner, writer in zip(plans, planners, writers, strict=True)
    ]
    writers[0].finish(metadata, results)


def load(folder: Path, views: Mapping[str, ShardView]) -> None:
    dcp.load(dict(views), checkpoint_id=folder, planner=ShardLoadPlanner(), no_dist=True)


def assert_loads(folder: Path, plan: NtpPlan) -> None:
    for rank, views in views_of(plan, is_unset=True).items():
        if plan.topology.coordinates(rank)["cp"]:
            continue
        if views:
            load(folder, views)
        expected = WHOLE.shards(plan, rank)
        assert set(views) == set(expected)
        for name, x in expected.items():
            assert_equal(views[name].tensor, x)


def uniform_views(degree: int, *, is_unset: bool = False) -> list[dict[str, ShardView]]:
    """Views of a run without any plan, as core makes them: stages one after another."""
    ranks = []
    for stage in WHOLE.wholes:
        for rank in range(degree):
            own = {}
            for name, whole in WHOLE.wholes[stage].items():
                parameter = parameter_name(name)
                known = made(1, [1]).units_of(parameter)
                layout = ParamLayout()
                if known is not None and known[1].is_split:
                    sections = [known[1].count * width for width in known[1].sections]
                    cuts = [
                        Layout.cuts(n, degree, unit=width)
                        for n, width in zip(sections, known[1].sections, strict=True)
                    ]
                    layout = ParamLayout(Layout.sections(cuts), WHOLE.dims[parameter])
                shard = whole.clone()
                if layout.layout is not None:
                    shard = take_shard(whole, layout.layout, rank, dim=layout.dim).clone()
                if is_unset:
                    shard = torch.full_like(shard, float("nan"))
                own[name] = ShardView(shard, layout, rank)
            ranks.append(own)
    return ranks


OTHERS = {
    "{4, 3}": made(4, [4, 3]),
    "{4, 4}": made(4, [4, 4]),
    "{4}": made(4, [4]),
    "{3}": made(3, [3]),
    "one process each": made(1, [1]),
    "{3, 3} of 4, the fourth idle": made(4, [4, 3], policy=Policy("nice")),
    "with cp": made(2, [2, 1], cp=2),
}


@pytest.mark.parametrize(
    ("saved", "others", "degrees"),
    [(made(4, [4, 3]), list(OTHERS), (1, 3)), (made(4, [3, 2]), ["{4, 3}", "{4}"], (3,))],
    ids=["{4,3}", "{3,2}"],
)
def test_it_is_read_under_every_plan_and_without_one(tmp_path, saved, others, degrees):
    save(tmp_path, list(views_of(saved).values()))
    for name in others:
        assert_loads(tmp_path, OTHERS[name])
    for degree in degrees:
        filled, expected = uniform_views(degree, is_unset=True), uniform_views(degree)
        for own, right in zip(filled, expected, strict=True):
            load(tmp_path, own)
            for entry in right:
                assert_equal(own[entry].tensor, right[entry].tensor)


def test_three_degrees_are_read_at_the_full_one(tmp_path: Path) -> None:
    save(tmp_path, list(views_of(made(4, [3, 2, 4])).values()))
    assert_loads(tmp_path, made(4, [4, 4]))


@pytest.mark.parametrize("degree", [1, 4])
def test_a_uniform_run_is_read_under_a_plan(tmp_path: Path, degree: int) -> None:
    save(tmp_path, uniform_views(degree))
    assert_loads(tmp_path, made(4, [4, 3]))


def test_the_canonical_replica_alone_saves() -> None:
    for own in OTHERS.values():
        for rank, views in views_of(own).items():
            place = own.place(rank)
            is_first = own.topology.coordinates(rank)["cp"] == 0
            saves = any(view.write_items(name) for name, view in views.items())
            canonical = own.canonical_replica(place.stage)
            assert saves == (place.replica == canonical and is_first and not place.is_idle)


def test_a_copy_for_a_later_save_saves_what_the_view_would() -> None:
    own = OTHERS["{4, 3}"]
    for views in views_of(own).values():
        for name, view in views.items():
            assert len(view.clone().write_items(name)) == len(view.write_items(name))
