"""Models of torch's FSDP2 whose gathers and reduces go through groups of their own."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_support.trainings import SmallModel, model_of, open_two, shard, tokens
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp.fsdp2_communicators import separate_communicators

# Large enough for pairs of ranks, and small enough for torch's own.
WIDTHS = (256, 8)


def sharded_by_torch(model: nn.Module, size: int, **options: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for block in getattr(model, "blocks", ()):
        fsdp2(block, mesh=mesh, **options)
    return fsdp2(model, mesh=mesh, **options)


def comms(model: nn.Module) -> list[object]:
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    return [
        comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)
    ]


def trained(model: nn.Module, rank: int, steps: int = 3) -> list[Tensor]:
    """Losses of some steps, and the shards after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    for step in range(steps):
        for micro in range(2):
            losses.append(model(tokens(step, micro, rank)).square().mean())
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [x.detach().clone() for x in (*losses, *parts)]


def spied(group: Group) -> tuple[Group, SpyCollectives]:
    spy = SpyCollectives(group.collectives)
    return group.with_collectives(spy), spy


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak)]
)
@ranks(2)
def test_bits_are_those_of_fsdp2_as_shipped(rank: int, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for width in WIDTHS:
        expected = trained(
            sharded_by_torch(model_of(torch.float32, dim=width), 2, mp_policy=policy), rank
        )
        model = sharded_by_torch(model_of(torch.float32, dim=width), 2, mp_policy=policy)
        with open_two() as groups:
            gather, gathers = spied(groups["dp", "gather"])
            reduce, reduces = spied(groups["dp", "reduce"])
            separate_communicators(model, gather=gather, reduce=reduce)
            found = trained(model, rank)
            assert gathers.counts["all_gather"] > 0
            assert reduces.counts["reduce_scatter"] > 0
            assert "reduce_scatter" not in gathers.counts
            assert "all_gather" not in reduces.counts
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@ranks(3)
def test_more_ranks_add_in_another_order(rank: int) -> None:
    expected = trained(sharded_by_torch(model_of(dim=96), 3), rank)
    with open_two(3) as groups:
        model = sharded_by_torch(model_of(dim=96), 3)
        separate_communicators(model, gather=groups["dp", "gather"], reduce=groups["dp", "reduce"])
        for one, other in zip(trained(model, rank), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@ranks(2)
def test_undone_it_is_what_it_was(rank: int) -> None:
    model = sharded_by_torch(model_of(torch.float32), 2)
    before = comms(model)
    with open_two() as groups:
        reduce, reduces = spied(groups["dp", "reduce"])
        found = separate_communicators(model, reduce=reduce)
        assert found.names[0] == "(root)"
        assert len(found.names) == 5
        # Gathers are left as they were.
        assert [one is other for one, other in zip(comms(model), before, strict=True)] == [
            True,
            False,
        ] * 5
        with pytest.raises(ConfigError, match="a OwnReduceScatter for its reduces already"):
            separate_communicators(model, reduce=reduce)
        separate_communicators(model, gather=groups["dp", "gather"]).undo()
        trained(model, rank, 1)
        found.undo()
        found.undo()
        assert all(one is other for one, other in zip(comms(model), before, strict=True))
        count = reduces.counts["reduce_scatter"]
        trained(model, rank, 1)
        assert reduces.counts["reduce_scatter"] == count > 0
        separate_communicators(model, gather=groups["dp", "gather"], reduce=reduce)
    # Closing the groups undoes it too, and the model goes on.
    assert all(one is other for one, other in zip(comms(model), before, strict=True))
    trained(model, rank, 1)


@ranks(2)
def test_process_groups_and_meshes_will_do(rank: int) -> None:
    expected = trained(sharded_by_torch(model_of(torch.float32), 2), rank)
    model = sharded_by_torch(model_of(torch.float32), 2)
    group = dist.new_group([0, 1])
    found = separate_communicators(model, gather=init_device_mesh("cpu", (2,)), reduce=group)
    for one, other in zip(trained(model, rank), expected, strict=True):
        assert torch.equal(one, other)
    found.undo()
    del model, found
    gc.collect()
    dist.destroy_process_group(group)


@ranks(2, leaves="torch keeps the groups of the mesh of one rank")
def test_what_is_refused(rank: int) -> None:
    with (
        open_groups(Topology({"dp": 2, "one": 1}), [("dp", "gather"), "one"]) as groups,
        open_two() as two,
    ):
        gather = groups["dp", "gather"]
        model = sharded_by_torch(SmallModel(), 2)
        before = comms(model)
        plain, ours = SmallModel(), SmallModel()
        sharded = shard(ours, two)
        mixed = copy.deepcopy(plain)
        fsdp2(mixed.head, mesh=init_device_mesh("cpu", (2,)))
        fsdp2(mixed.norm, mesh=_alone())
        for wrong, options, error, words in (
            (plain, {"gather": gather}, ConfigError, "no module that FSDP2 has sharded"),
            (sharded.model, {"gather": gather}, ConfigError, "no module that FSDP2 has sharded"),
            (model, {}, ConfigError, "neither gather= nor reduce="),
            (model, {"reduce": "dp"}, ConfigError, "separate_communicators: reduce: 'dp'"),
            (model, {"gather": _both()}, ConfigError, "a mesh of 2 dimensions"),
            (model, {"reduce": groups["one"]}, TopologyError, r"module '\(root\)', reduce=one"),
            (mixed, {"gather": gather}, TopologyError, "module 'norm'"),
        ):
            with pytest.raises(error, match=words):
                separate_communicators(wrong, **options)  # type: ignore[arg-type]
        assert all(one is other for one, other in zip(comms(model), before, strict=True))
        several = sharded_by_torch(SmallModel(), 2)
        state = several._get_fsdp_state()
        state._fsdp_param_groups.append(state._fsdp_param_groups[0])
        with pytest.raises(UnsupportedError, match="2 groups of parameters"):
            separate_communicators(several, gather=gather)
        with pytest.raises(ValueError, match="not supported with multiple param groups"):
            several.set_custom_all_gather(comms(model)[0])


def _both() -> torch.distributed.device_mesh.DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))


def _alone() -> torch.distributed.device_mesh.DeviceMesh:
    """A mesh of this rank, as a part of one over all."""
    return _both()["b"]
