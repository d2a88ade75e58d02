"""What the public implementation of nonuniform tensor parallelism gets wrong at real degrees.

There the gradients of row-parallel weights are added to unrelated elements (b), those of
column-parallel weights are right only in a permuted order of storage (c), replicated parameters
keep their local gradient on some ranks (d), and units that divide by one degree alone are an
IndexError, or sizes that do not match (e). `test_grad_sync` compares every element of (b) to (d).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.groups.open_groups import Groups
from pcomm.core.tensor_parallel import ParamLayout, take_shard
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, NtpPlan, Units, grad_groups, plan
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.params import local_ranges

BOTH = pytest.mark.parametrize("strategy", ["interval", "gather-core"])


def damaged(full: int, left: int, units: dict[str, Units]) -> NtpPlan:
    """Two replicas, of which the second has lost its first ranks."""
    gone = [Coord(dp=1, tp=tp) for tp in range(full - left)]
    return plan(Topology({"dp": 2, "tp": full}), Failures.at(*gone), units)


class OneWeight(nn.Module):
    """A weight of two sections of `count` units each, as a gated layer has it."""

    def __init__(self, made: NtpPlan, rank: int, count: int) -> None:
        super().__init__()
        place = made.place(rank)
        self.layout, self.index = made.layout("weight", place.replica), place.index
        self.param_layouts = {"weight": ParamLayout(self.layout)}
        shard = self.own(torch.zeros(2 * count, 2, dtype=torch.float64))
        self.weight = nn.Parameter(shard.clone())

    def own(self, whole: Tensor) -> Tensor:
        return take_shard(whole, self.layout, self.index)


@BOTH
@pytest.mark.parametrize("case", [(4, 3, 8), (8, 7, 32), (8, 6, 32)], ids=str)
def test_defect_e_units_that_do_not_divide(case: tuple[int, int, int], strategy: Strategy) -> None:
    full, left, count = case
    made = damaged(full, left, {"weight": Units.gated(count)})
    whole = torch.arange(4 * count, dtype=torch.float64).view(2 * count, 2)

    def task(rank: int, groups: Groups) -> None:
        model = OneWeight(made, rank, count)
        sync = GradSync(made, model, groups, rank=rank, strategy=strategy)
        replica = made.place(rank).replica
        with sync.accumulate():
            (model.weight * model.own(whole * 10.0**replica)).sum().backward()
        sync.finish()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, model.own(whole * 11.0))

    run_on_virtual_groups(made.topology, grad_groups(made, strategy), task)


@pytest.mark.parametrize(
    "case", [(32, 30, 128), (32, 28, 128), (64, 63, 128), (8, 6, 48), (72, 71, 360)], ids=str
)
def test_defect_e_ranges_of_large_degrees_are_the_whole_shard_once(case):
    full, left, count = case
    units = Units.gqa(q=2 * count, kv=count, dim=2)
    made = damaged(full, left, {"weight": units})
    alive = [rank for rank in made.topology.ranks if rank not in made.topology.failed]
    groups = made.groups("weight", alive[0])
    names = {spec.ranks for spec in grad_groups(made)}
    for rank in alive:
        place = made.place(rank)
        layout = made.layout("weight", place.replica)
        positions: list[int] = []
        for one in groups:
            if rank in one.ranks:
                assert one.ranks in names
                for run in local_ranges(units, layout.runs[place.index], one.start, one.stop):
                    positions += range(run.start, run.stop)
        assert sorted(positions) == list(range(layout.sizes[place.index]))
