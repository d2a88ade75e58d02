"""Groups as a `DeviceMesh` and a `DeviceMesh` as groups, without new communicators on the way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.core.groups.device_mesh import device_mesh, groups_from_device_mesh
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

SQUARE = Topology({"dp": 2, "tp": 2})


def num_communicators() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@ranks(4)
def test_a_mesh_uses_the_communicators_of_the_groups(rank: int) -> None:
    with open_groups(SQUARE, ["tp", "dp"]) as groups:
        before = num_communicators()
        mesh = device_mesh(groups, ["dp", "tp"])
        assert num_communicators() == before
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.get_group("tp") is groups["tp"].process_group
        assert mesh.get_group("dp") is groups["dp"].process_group
        assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
        # The dimensions stand in the order asked for.
        mesh = device_mesh(groups, ["tp", "dp"])
        assert mesh.mesh.tolist() == [[0, 2], [1, 3]]
        assert list(mesh.get_coordinate()) == [rank % 2, rank // 2]


@ranks(4, leaves="torch keeps the meshes of DTensors in a cache")
def test_torch_computes_on_the_mesh(rank: int) -> None:
    """A DTensor on a mesh that is neither in rank order nor without a dimension of size 1."""
    topology = Topology({"pp": 1, "dp": 2, "tp": 2}, order=("dp", "pp", "tp"))
    whole = torch.arange(24.0).view(4, 6)
    with open_groups(topology, ["tp", "dp", "pp"]) as groups:
        mesh = device_mesh(groups, ["dp", "pp", "tp"])
        assert mesh.mesh.tolist() == [[[0, 2]], [[1, 3]]]
        split = distribute_tensor(whole, mesh, [Shard(0), Replicate(), Shard(1)])
        dp, tp = groups["dp"].rank, groups["tp"].rank
        assert_equal(split.to_local(), whole.chunk(2, 0)[dp].chunk(2, 1)[tp].contiguous())
        assert_equal(split.full_tensor(), whole)
        assert_equal((split @ split.T).full_tensor(), whole @ whole.T)


@ranks(4)
def test_a_mesh_holds_this_part_of_the_world_only(rank: int) -> None:
    topology = Topology({"pp": 2, "dp": 2})
    with open_groups(topology, ["dp"]) as groups:
        mesh = device_mesh(groups, ["dp"])
        assert mesh.mesh.tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert mesh.get_group() is groups["dp"].process_group


@ranks(2)
def test_a_dimension_of_size_one_gets_a_communicator_that_is_closed(rank: int) -> None:
    topology = Topology({"dp": 2, "cp": 1, "tp": 1})
    before = num_communicators()
    with open_groups(topology, ["dp", "cp", "tp"]) as groups:
        assert num_communicators() == before + 1
        mesh = device_mesh(groups, ["dp", "cp", "tp"])
        assert num_communicators() == before + 3
        assert mesh.mesh.tolist() == [[[0]], [[1]]]
        alone = mesh.get_group("cp")
        assert dist.get_process_group_ranks(alone) == [rank]
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=alone)
        assert float(x) == rank
        # The groups stay what they are: nothing is sent where one rank is alone.
        assert groups["cp"].process_group is None
    assert num_communicators() == before


@ranks(4)
def test_a_role_or_a_view_can_be_a_dimension(rank: int) -> None:
    topology = SQUARE.view("expert", {"edp": 2, "ep": 2}, order=("edp", "ep"))
    keys = ["expert.ep", "expert.edp", "dp_tp", ("dp_tp", "gather")]
    with open_groups(topology, keys) as groups:
        mesh = device_mesh(groups, ["expert.ep", "expert.edp"])
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh["expert.ep"].get_group() is groups["expert.ep"].process_group
        gather = device_mesh(groups, [("dp_tp", "gather")])
        assert gather.get_group() is groups["dp_tp", "gather"].process_group
        assert gather.mesh_dim_names == ("dp_tp",)


@ranks(4)
def test_axes_that_are_no_mesh_are_refused(rank: int) -> None:
    topology = SQUARE.view("expert", {"edp": 2, "ep": 2}, order=("edp", "ep"))
    with open_groups(topology, ["tp", "dp", "dp_tp", "expert.edp"]) as groups:
        before = num_communicators()
        for axes, words in (
            (["tp", "dp_tp"], "same axis twice"),
            (["tp", "expert.edp"], r"the views \['\(none\)', 'expert'\]"),
            (["tpp"], "Did you mean 'tp'"),
            ([], r"the views \[\]"),
        ):
            with pytest.raises(TopologyError, match=words):
                device_mesh(groups, axes)
        assert num_communicators() == before


@ranks(4)
def test_a_mesh_has_no_holes(rank: int) -> None:
    topology = Topology({"dp": 2, "tp": 2}).with_failed([3])
    if rank == 3:
        return
    with open_groups(topology, ["tp", "dp"]) as groups:
        with pytest.raises(TopologyError, match="3 of 4 ranks, failed are"):
            device_mesh(groups, ["dp", "tp"])
        if rank < 2:
            assert device_mesh(groups, ["tp"]).mesh.tolist() == [0, 1]


@ranks(2)
def test_groups_without_a_topology_make_no_mesh(rank: int) -> None:
    both = dist.new_group([0, 1])
    # Before both are connected, the end of one is an error of the other.
    dist.barrier()
    with pytest.raises(UnsupportedError, match="open_groups"):
        device_mesh(Groups.from_process_groups({"dp": both}), ["dp"])


def test_one_process_needs_torch_distributed_for_a_mesh() -> None:
    with (
        open_groups(Topology({"dp": 1}), ["dp"]) as groups,
        pytest.raises(ConfigError, match="world_size=1"),
    ):
        device_mesh(groups, ["dp"])


@ranks(1, leaves="torch keeps the meshes of DTensors in a cache")
def test_one_process_makes_a_mesh_of_size_one(rank: int) -> None:
    with open_groups(Topology({"dp": 1, "tp": 1}), ["dp", "tp"]) as groups:
        mesh = device_mesh(groups, ["dp", "tp"])
        assert mesh.mesh.tolist() == [[0]]
        x = torch.arange(4.0)
        assert_equal(distribute_tensor(x, mesh, [Shard(0), Shard(0)]).full_tensor(), x)


@ranks(4)
def test_every_dimension_of_a_mesh_becomes_a_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    before = num_communicators()
    with groups_from_device_mesh(mesh) as groups:
        assert groups["tp"].ranks == ((0, 1) if rank < 2 else (2, 3))
        assert groups["dp"].ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert groups["tp"].process_group is mesh.get_group("tp")
        assert groups["cp"].is_identity
        assert groups["dp"].rank == rank // 2
        total = groups["dp"].collectives.all_reduce(torch.tensor([1 << rank]))
        assert int(total) == sum(1 << r for r in groups["dp"].ranks)
    assert num_communicators() == before


@ranks(4)
def test_there_and_back_the_groups_are_the_same(rank: int) -> None:
    with open_groups(SQUARE, ["tp", "dp"]) as groups:
        back = groups_from_device_mesh(device_mesh(groups, ["dp", "tp"]))
        for name in ("dp", "tp"):
            assert back[name].process_group is groups[name].process_group
            assert back[name].ranks == groups[name].ranks
            assert back[name].rank == groups[name].rank


@ranks(3)
def test_a_mesh_without_names_or_without_this_rank_is_refused(rank: int) -> None:
    with pytest.raises(TopologyError, match="no mesh_dim_names"):
        groups_from_device_mesh(DeviceMesh("cpu", [0, 1, 2]))
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if rank == 2:
        with pytest.raises(TopologyError, match="this is rank 2"):
            groups_from_device_mesh(part)
    else:
        assert groups_from_device_mesh(part)["tp"].ranks == (0, 1)
    # No rank closes a connection while another one still makes it.
    dist.barrier()
