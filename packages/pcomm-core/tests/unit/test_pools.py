"""Registration of memory, on the fake that has torch's asymmetric semantics."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import FakeCommunicator, FakePool, FakePools, NcclPools
from pcomm.core.memory.pools import Arena, PoolRegistry, State

GATHER = Group("dp", (0,), None, role="gather")
REDUCE = Group("dp", (0,), None, role="reduce")
OUTER = Group("hsdp", (0,), None, role="gather")
CONTROL = Group("dp", (0,), None, role="control")


def opened(backend: FakePools) -> tuple[Groups, PoolRegistry]:
    groups = Groups([GATHER, REDUCE, OUTER, CONTROL])
    return groups, PoolRegistry(groups, CONTROL, backend)


def filled(registry: PoolRegistry, role: str, sizes: Sequence[int] = (64, 32)) -> Arena:
    arena = registry.arena(role)
    with arena.allocating() as pool:
        for size in sizes:
            pool.allocate(size)
    arena.freeze()
    return arena


class TestTorchsSemantics:
    """What the fake promises, one statement of the reference at a time."""

    def pool(self, *sizes: int) -> FakePool:
        pool = FakePool(0)
        for size in sizes:
            pool.allocate(size)
        return pool

    def test_registering_twice_is_no_error_and_deregistering_twice_is_one(self) -> None:
        communicator, pool = FakeCommunicator("dp"), self.pool(8, 8)
        communicator.register_mem_pool(pool)
        communicator.register_mem_pool(pool)
        communicator.deregister_mem_pool(pool)
        assert (communicator.pools, communicator.segments) == (set(), {})
        with pytest.raises(RuntimeError, match="was not registered before"):
            communicator.deregister_mem_pool(pool)

    def test_a_failure_half_way_leaves_the_pool_noted(self) -> None:
        pool = self.pool(8, 8, 8)
        first, second, third = pool.segments
        communicator = FakeCommunicator("dp", refused={second})
        with pytest.raises(RuntimeError, match="cannot register"):
            communicator.register_mem_pool(pool)
        assert communicator.pools == {0}
        assert set(communicator.segments) == {first}
        # A segment registered after the missing one is never reached again.
        communicator.segments[third] = 8
        with pytest.raises(RuntimeError, match="is not registered"):
            communicator.deregister_mem_pool(pool)
        assert communicator.pools == set()
        assert set(communicator.segments) == {third}

    def test_both_fail_before_the_communicator_is_initialised(self) -> None:
        communicator = FakeCommunicator("dp", is_ready=False)
        for call in (communicator.register_mem_pool, communicator.deregister_mem_pool):
            with pytest.raises(RuntimeError, match="not initialised"):
                call(self.pool(8))
        assert communicator.pools == set()


def test_here_a_communicator_named_twice_is_registered_once() -> None:
    backend = FakePools()
    # Two groups over the same ranks that share a communicator, and one of them given twice.
    backend.communicators["hsdp[gather]"] = backend.communicator(GATHER).registrar
    groups, registry = opened(backend)
    arena = filled(registry, "gather")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.bind(arena, [OUTER, GATHER, GATHER])
        registry.bind(arena, [GATHER])
        assert backend.log == ["register 0 dp[gather]"]
        registry.unbind(arena)
        registry.bind(arena, [OUTER])
        groups.close()
    assert backend.log == ["register 0 dp[gather]", "deregister 0 dp[gather]"] * 2


def test_order_is_canonical_and_undone_in_reverse() -> None:
    backend = FakePools()
    groups, registry = opened(backend)
    one, two = filled(registry, "gather"), filled(registry, "reduce")
    registry.bind(one, [OUTER, GATHER])
    registry.bind(two, [REDUCE])
    assert [(b.group, b.state) for b in registry.bindings] == [
        ("dp[gather]", State.BOUND),
        ("hsdp[gather]", State.BOUND),
        ("dp[reduce]", State.BOUND),
    ]
    groups.close()
    registry.close()
    assert backend.log == [
        "register 0 dp[gather]",
        "register 0 hsdp[gather]",
        "register 1 dp[reduce]",
        "deregister 1 dp[reduce]",
        "deregister 0 hsdp[gather]",
        "deregister 0 dp[gather]",
    ]
    assert list(backend.registered()) == []


def test_each_role_has_one_pool_of_its_own() -> None:
    _, registry = opened(FakePools())
    assert registry.arena("gather") is registry.arena("gather")
    assert registry.arena("gather").pool is not registry.arena("reduce").pool
    assert registry.arena("gather", "scratch").pool is not registry.arena("gather").pool


def test_a_buffer_used_on_two_communicators_is_said_to_be() -> None:
    backend = FakePools()
    _, registry = opened(backend)
    arena = filled(registry, "reduce")
    with pytest.raises(ConfigError, match="an arena for role 'reduce'"):
        registry.bind(arena, [REDUCE, OUTER])
    assert backend.log == []
    registry.bind(arena, [REDUCE, OUTER], across_roles=True)
    assert len(list(backend.registered())) == 4


def test_a_pair_that_cannot_be_deregistered_is_broken_and_stays_so() -> None:
    backend = FakePools()
    groups, registry = opened(backend)
    arena = filled(registry, "gather")
    registry.bind(arena, [GATHER, OUTER])
    # Somebody else interferes, as an allocator's hook may.
    backend.communicators["hsdp[gather]"].pools.clear()
    with pytest.raises(UnsupportedError, match="was not registered before"):
        registry.unbind(arena)
    assert [(b.group, b.state) for b in registry.bindings] == [("hsdp[gather]", State.BROKEN)]
    assert {name for name, _ in backend.registered()} == {"hsdp[gather]"}
    with pytest.raises(ConfigError, match="broken"):
        registry.unbind(arena)
    with pytest.raises(ConfigError, match="broken"):
        registry.bind(arena, [OUTER])
    groups.close()


def test_closing_tries_everything_and_raises_what_failed() -> None:
    backend = FakePools()
    groups, registry = opened(backend)
    registry.bind(filled(registry, "gather"), [GATHER, OUTER])
    backend.communicators["hsdp[gather]"].is_ready = False
    with pytest.raises(UnsupportedError, match="not initialised"):
        groups.close()
    assert {name for name, _ in backend.registered()} == {"hsdp[gather]"}
    with pytest.raises(ConfigError, match="closed"):
        registry.arena("gather")


def test_only_final_layouts_are_bound() -> None:
    backend = FakePools()
    _, registry = opened(backend)
    arena = registry.arena("gather")
    with pytest.raises(ConfigError, match="no memory in it"):
        arena.freeze()
    with arena.allocating() as pool:
        pool.allocate(64)
    with pytest.raises(ConfigError, match="not frozen"):
        registry.bind(arena, [GATHER])
    arena.freeze()
    with pytest.raises(ConfigError, match="frozen, with 64 bytes"):
        arena.allocating()
    arena.pool.allocate(32)
    with pytest.raises(ConfigError, match=r"\(64, 32\) bytes, frozen with \(64,\)"):
        registry.bind(arena, [GATHER])
    assert backend.log == []


def test_mistakes_with_other_registries_groups_and_backends() -> None:
    _, registry = opened(FakePools())
    _, other = opened(FakePools())
    with pytest.raises(ConfigError, match="another registry"):
        registry.bind(filled(other, "gather"), [GATHER])
    arena = filled(registry, "gather")
    with pytest.raises(ConfigError, match="not in dp"):
        registry.bind(arena, [Group("dp", (0, 1), None, role="gather")])
    with pytest.raises(ConfigError, match="bound to no communicator"):
        registry.unbind(arena)
    with pytest.raises(UnsupportedError, match="one rank, without a communicator"):
        NcclPools(GATHER)


def test_a_communicator_under_other_ranks_is_refused() -> None:
    backend = FakePools()
    groups = Groups([])
    registry = PoolRegistry(groups, Group("dp", (0, 1), None, role="control"), backend)
    arena = filled(registry, "gather")
    pair = Group("hsdp", (0, 1), None, role="gather")
    backend.communicators["hsdp[gather]"] = backend.communicator(GATHER).registrar
    with pytest.raises(ConfigError, match=r"of ranks \(0,\) under dp\[gather\]"):
        registry._new_pairs(arena, [GATHER, pair], False)


def test_a_group_without_a_communicator_has_nothing_to_register() -> None:
    class Alone(FakePools):
        def communicator(self, group: Group) -> Any:
            return None

    backend = Alone()
    groups, registry = opened(backend)
    arena = filled(registry, "gather")
    registry.bind(arena, [GATHER])
    assert registry.bindings == ()
    groups.close()
    assert backend.log == []
