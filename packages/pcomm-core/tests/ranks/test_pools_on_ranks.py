"""Registration as a transaction of several ranks, which meet in the store of a gloo job."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from pcomm.core.errors import ConfigError, DivergenceError, PcommError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.memory.pool_backends import FakePools, NcclPools
from pcomm.core.memory.pools import Arena, PoolRegistry
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology

SPECS = [("dp", "gather"), ("dp", "reduce"), ("dp", "control")]


def filled(registry: PoolRegistry, *sizes: int) -> Arena:
    arena = registry.arena("gather")
    with arena.allocating() as pool:
        for size in sizes:
            pool.allocate(size)
    arena.freeze()
    return arena


def opened(groups: Groups) -> tuple[FakePools, PoolRegistry]:
    backend = FakePools()
    return backend, PoolRegistry(groups, groups["dp", "control"], backend, timeout_s=PATIENCE_S)


@ranks(3)
def test_another_layout_on_one_rank_is_an_error_on_all_before_anything(rank: int) -> None:
    with open_groups(Topology({"dp": 3}), SPECS) as groups:
        backend, registry = opened(groups)
        # Equal in sum: only the order of the segments differs, which hangs a window's registration.
        arena = filled(registry, *((64, 32) if rank == 1 else (32, 64)))
        with pytest.raises(DivergenceError, match=r"segment 0: 32 bytes.*rank 1 has .*64 bytes"):
            registry.bind(arena, [groups["dp", "gather"]])
        assert backend.log == []


@ranks(2)
def test_other_groups_on_one_rank_are_an_error_on_all(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), SPECS) as groups:
        backend, registry = opened(groups)
        arena = filled(registry, 64)
        role = "gather" if rank == 0 else "reduce"
        with pytest.raises(DivergenceError, match=r"dp\[gather\].*dp\[reduce\]"):
            registry.bind(arena, [groups["dp", role]], across_roles=True)
        assert backend.log == []


@ranks(2)
def test_a_mistake_on_one_rank_reaches_the_other(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), SPECS) as groups:
        backend, registry = opened(groups)
        arena = registry.arena("gather")
        arena.pool.allocate(64)
        if rank == 0:
            arena.freeze()
        with pytest.raises(PeerError if rank == 0 else ConfigError, match="not frozen"):
            registry.bind(arena, [groups["dp", "gather"]])
        assert backend.log == []


@ranks(2)
def test_what_fails_on_one_rank_is_undone_on_all(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), SPECS) as groups:
        backend, registry = opened(groups)
        arena = filled(registry, 64, 32)
        both = [groups["dp", "reduce"], groups["dp", "gather"]]
        if rank == 1:
            refusing = backend.communicator(both[0]).registrar
            refusing.refused = {list(arena.pool.segments)[1]}
        with pytest.raises(UnsupportedError if rank else PeerError, match="cannot register"):
            registry.bind(arena, both, across_roles=True)
        assert list(backend.registered()) == []
        assert registry.bindings == ()


@ranks(2)
def test_memory_goes_while_the_communicators_still_work(rank: int) -> None:
    groups = open_groups(Topology({"dp": 2}), SPECS)
    backend, registry = opened(groups)
    gather = groups["dp", "gather"]
    process_group = weakref.ref(gather.process_group)
    registry.bind(filled(registry, 64), [gather])
    fake = backend.communicators["dp[gather]"]
    sums = []
    plain = fake.deregister_mem_pool

    def deregister(pool: object) -> None:
        sums.append(gather.collectives.all_reduce(torch.ones(2)))
        plain(pool)  # type: ignore[arg-type]

    fake.deregister_mem_pool = deregister  # type: ignore[method-assign]
    groups.close()
    assert_equal(sums[0], torch.full((2,), 2.0))
    assert list(backend.registered()) == []
    assert process_group() is None


@ranks(2)
def test_a_rank_that_does_not_close_keeps_nobodys_memory(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), SPECS) as groups:
        backend = FakePools()
        registry = PoolRegistry(groups, groups["dp", "control"], backend, timeout_s=1.0)
        registry.bind(filled(registry, 64), [groups["dp", "gather"]])
        groups["dp", "control"].collectives.all_reduce(torch.zeros(1))
        if rank == 0:
            with pytest.raises(PcommError, match=r"ranks \[1\]"):
                registry.close()
            assert list(backend.registered()) == []
        groups["dp", "control"].collectives.all_reduce(torch.zeros(1))
        if rank == 1:
            # It comes too late, and hears of it.
            with pytest.raises(PcommError, match=r"ranks \[1\]"):
                registry.close()
            assert list(backend.registered()) == []


@ranks(2)
def test_communicators_close_also_where_memory_cannot_be_taken_away(rank: int) -> None:
    groups = open_groups(Topology({"dp": 2}), SPECS)
    backend, registry = opened(groups)
    registry.bind(filled(registry, 64), [groups["dp", "gather"]])
    communicators = {group.process_group for group in groups.values()}
    backend.communicators["dp[gather]"].is_ready = False
    with pytest.raises(UnsupportedError, match="not initialised"):
        groups.close()
    assert not communicators & set(dist.distributed_c10d._world.pg_map)


@ranks(2)
def test_gloo_registers_no_memory_and_says_so(rank: int) -> None:
    with (
        open_groups(Topology({"dp": 2}), SPECS) as groups,
        pytest.raises(UnsupportedError, match=r"dp\[gather\]: a communicator of gloo"),
    ):
        NcclPools(groups["dp", "gather"])
