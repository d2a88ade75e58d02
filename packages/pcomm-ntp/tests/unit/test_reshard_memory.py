"""Tensors that `redistribute` is given on both sides, and parameters themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core import Topology
from pcomm.core.errors import LayoutError, PcommError, PeerError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.tensor_parallel import ParamLayout, take_shard
from pcomm.ntp import Coord, Failures, NtpPlan, Units, plan
from pcomm.ntp.redistribute import redistribute

# Of seven units the second rank has 1 and 2 at degree 4, and 2 and 3 at degree 3: as many.
TOPOLOGY, UNITS = Topology({"dp": 2, "tp": 4}), {"w": Units.columns(7)}
OLD = plan(TOPOLOGY, Failures(), UNITS)
NEW = plan(TOPOLOGY, Failures.at(Coord(dp=1, tp=3)), UNITS)
MOVED = 5
WHOLE = torch.arange(7.0)


def own(made: NtpPlan, rank: int) -> Tensor:
    place = made.place(rank)
    return take_shard(WHOLE, made.layout("w", place.replica), place.index, dim=0).clone()


def resharded(rank: int, groups: Groups, source: Tensor, target: Tensor) -> None:
    redistribute(
        OLD,
        NEW,
        groups["all"],
        rank=rank,
        source={"model.w": source},
        target={"model.w": target},
        param_layouts={"w": ParamLayout(NEW.layout("w", NEW.place(rank).replica))},
        holders=range(7),
    )


@pytest.mark.parametrize("form", ["same", "detached", "overlapping"])
def test_one_memory_for_other_units_is_refused_on_all_ranks(form: str) -> None:
    def task(rank: int, groups: Groups) -> PcommError:
        source = own(OLD, rank)
        target = torch.full_like(own(NEW, rank), -1.0)
        if rank == MOVED:
            memory = torch.cat([source, source])
            source = memory[:2]
            chosen = {"same": source, "detached": source.detach(), "overlapping": memory[1:3]}
            target = chosen[form]
        with pytest.raises(PcommError) as caught:
            resharded(rank, groups, source, target)
        assert source.tolist() == own(OLD, rank).tolist()
        return caught.value

    specs = [GroupSpec.of_ranks(range(7), "all")]
    found = run_on_virtual_groups(NEW.topology, specs, task)
    assert isinstance(found.pop(MOVED), LayoutError)
    for error in found.values():
        assert isinstance(error, PeerError)
        assert "one memory on both sides, for units 1 to 2 before and 2 to 3 after" in str(error)


def test_neighbours_in_one_memory_and_parameters_themselves() -> None:
    def task(rank: int, groups: Groups) -> None:
        before, after = own(OLD, rank), own(NEW, rank)
        memory = torch.full((len(before) + len(after),), -1.0)
        source, target = memory.split([len(before), len(after)])
        source.copy_(before)
        resharded(rank, groups, nn.Parameter(source), nn.Parameter(target))
        assert memory.tolist() == [*before.tolist(), *after.tolist()]

    run_on_virtual_groups(NEW.topology, [GroupSpec.of_ranks(range(7), "all")], task)
