"""Memory of both roles registered with one-rank NCCL communicators; never run on hardware yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import NcclPools
from pcomm.core.memory.pools import PoolRegistry, State

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]


def test_two_roles_are_registered_and_given_back(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        # One rank, and still a communicator for each role: open_groups would make none.
        members = {role: dist.new_group([0], backend="nccl") for role in ("gather", "reduce")}
        roles = {role: Group("dp", (0,), pg, role=role) for role, pg in members.items()}
        groups = Groups(list(roles.values()), owned=list(members.values()))
        backend = NcclPools(roles["gather"])
        registry = PoolRegistry(groups, Group("dp", (0,), None, role="control"), backend)
        kept = []
        for role, group in roles.items():
            group.collectives.all_reduce(torch.ones(1, device=device))
            arena = registry.arena(role)
            with arena.allocating():
                kept.append(torch.ones(1 << 20, device=device))
            arena.freeze()
            registry.bind(arena, [group])
            registry.bind(arena, [group])
        assert [binding.state for binding in registry.bindings] == [State.BOUND] * 2
        gathered = roles["gather"].collectives.all_gather(kept[0])
        assert gathered.sum().item() == 1 << 20
        # The asymmetry that the fake imitates.
        raw = backend.communicator(roles["gather"])
        assert raw is not None
        pool = registry.arena("gather").pool
        raw.registrar.register_mem_pool(pool)
        registry.unbind(registry.arena("gather"))
        with pytest.raises(RuntimeError):
            raw.registrar.deregister_mem_pool(pool)
        registry.bind(registry.arena("gather"), [roles["gather"]])
        torch.cuda.synchronize()
        groups.close()
    finally:
        dist.destroy_process_group()
