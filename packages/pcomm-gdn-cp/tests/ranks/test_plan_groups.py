"""What `make_plan` takes as a group, and what is left of plans on real ranks."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gdn_cp_support.planned_mixers import layer_stack, weights_of, world
from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.errors import ConfigError, DivergenceError, PeerError
from pcomm.core.groups.group import Group
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import wait_until
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Plan, Spec, make_plan

PACK, DIM = (0, 48, 48, 96), 6
GDN, ATTENTION = GdnSpec(2, 4, 3, 5), AttentionSpec(4, 2, 4)
SPECS: list[Spec] = [GDN, ATTENTION]


def layers(plan: Plan) -> Tensor:
    numbers = torch.linspace(-1, 1, plan.tokens.num_tokens * DIM).double()
    y = plan.shard(numbers.view(-1, DIM)).requires_grad_()
    y = layer_stack(plan, SPECS, y, [weights_of(spec, DIM) for spec in SPECS])
    y.square().sum().backward()
    return y.detach()


def closed(*meshes: DeviceMesh) -> None:
    """End what meshes have opened, so that later tests of these processes do not find it."""
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            continue
        for group in mesh.get_all_groups():
            if group is not world():
                dist.destroy_process_group(group)


@ranks(2)
def test_process_groups_and_meshes_are_groups(rank: int) -> None:
    expected = layers(make_plan(PACK, Group.from_process_group("cp", world()), SPECS))
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    for group in (world(), mesh):
        plan = make_plan(PACK, group, SPECS, verify=True)
        assert (plan.rank, plan.tokens.size) == (rank, 2)
        assert torch.equal(layers(plan), expected)
    # Their ranks compare plans like those of a Group.
    with pytest.raises(DivergenceError, match=r"cu_seqlens\[1\]"):
        make_plan((0, 48 + 4 * rank, 96), mesh, SPECS, verify=True)
    # Whatever goes wrong on one rank is known on the other, and nobody waits.
    specs: Any = SPECS if rank else "gdn"
    with pytest.raises(PeerError if rank else ConfigError, match="of type str"):
        make_plan(PACK, world(), specs, verify=True)
    closed(mesh)


@ranks(2)
def test_meshes_of_one_rank_and_of_several_dimensions(rank: int) -> None:
    square = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "cp"))
    with pytest.raises(ConfigError, match=r"dimensions \('dp', 'cp'\)(.|\n)*mesh\['cp'\]"):
        make_plan(PACK, square, SPECS)
    assert make_plan(PACK, square["cp"], SPECS).tokens.size == 2
    alone = make_plan(PACK, square["dp"], SPECS)
    assert (alone.rank, alone.tokens.size) == (0, 1)
    assert len(layers(alone)) == PACK[-1]
    of_first = DeviceMesh("cpu", [0], mesh_dim_names=("cp",))
    if rank:
        with pytest.raises(ConfigError, match="this rank is not in it"):
            make_plan(PACK, of_first, SPECS)
    other = dist.new_group([0])
    if rank:
        with pytest.raises(ConfigError, match="do not belong"):
            make_plan(PACK, other, SPECS)  # type: ignore[arg-type]
    else:
        dist.destroy_process_group(other)
    # No rank closes a connection while another one still makes it.
    dist.barrier()
    closed(square, of_first)


@ranks(2)
def test_plans_leave_no_tensors_threads_or_collectives(rank: int) -> None:
    group = Group.from_process_group("cp", world())

    def count() -> tuple[int, int, int]:
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(issubclass(type(x), Tensor) for x in objects)
        collectives = sum(issubclass(type(x), DistributedCollectives) for x in objects)
        return tensors, collectives, threading.active_count()

    def many(packs: range) -> None:
        for n in packs:
            strategy: Any = ("heads", "docs", "state", "gather")[n // 2 % 4]
            pack = (0, 48, 48, 52 + 4 * n, 160)
            layers(
                make_plan(pack, (group, world())[n % 2], SPECS, strategy=strategy).prepare("cpu")
            )

    many(range(8))
    before = count()
    many(range(8, 24))
    # Gloo's own thread lets go of the last operation's tensors some time after its end.
    wait_until(lambda: not_more(count(), before), "what sixteen more plans made is freed")
    assert not_more(count(), before)


def not_more(found: tuple[int, ...], allowed: tuple[int, ...]) -> bool:
    return all(n <= most for n, most in zip(found, allowed, strict=True))
