"""Registration of memory, on the fake that has torch's asymmetric semantics; reserved memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

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


CPU = torch.device("cpu")


def opened_alone() -> tuple[FakePools, Groups, PoolRegistry]:
    backend, groups = FakePools(), Groups([GATHER, CONTROL])
    return backend, groups, PoolRegistry(groups, CONTROL, backend)


def reserved(registry: PoolRegistry, count: int, num_bytes: int) -> Arena:
    arena = registry.new_arena("gather", "weights")
    arena.reserve(count, num_bytes, CPU)
    return arena


def test_what_comes_and_goes_stays_in_what_is_registered() -> None:
    backend, _, registry = opened_alone()
    arena = reserved(registry, 2, 64)
    registry.bind(arena, [GATHER])
    before = list(backend.registered())
    assert len(before) == 2
    storages = [torch.UntypedStorage(0) for _ in range(3)]
    for _ in range(3):
        for storage in storages[:2]:
            arena.fill(storage, 40)
        # Memory that is given back, and memory of what nobody holds, are both free again.
        storages[0].resize_(0)
        arena.fill(storages[2], 64)
        storages[1] = storages.pop()
        storages.append(torch.UntypedStorage(0))
        for storage in storages:
            storage.resize_(0)
    assert [storage.nbytes() for storage in storages] == [0] * 3
    assert list(backend.registered()) == before
    assert sorted(arena.pool.segments) == sorted(address for _, address in before)
    registry.unbind(arena)


def test_one_buffer_more_than_reserved_is_an_error_and_gets_nothing() -> None:
    _, _, registry = opened_alone()
    arena = reserved(registry, 2, 64)
    held = [torch.UntypedStorage(0) for _ in range(3)]
    for storage in held[:2]:
        arena.fill(storage, 64)
    with pytest.raises(ConfigError, match=r"weights(.|\n)*64 bytes: all 2 that(.|\n)*Reserve"):
        arena.fill(held[2], 64)
    # Nothing has been allocated, and what is there can be de-registered.
    assert held[2].nbytes() == 0
    assert len(arena.pool.segments) == 2
    with pytest.raises(ConfigError, match="frozen, with 128 bytes"):
        arena.reserve(1, 64, CPU)


def test_an_allocator_that_takes_new_memory_all_the_same_is_an_error() -> None:
    backend, _, registry = opened_alone()
    arena = reserved(registry, 2, 64)
    backend.address = lambda pool, storage: pool.allocate(64)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"in none of the 2 segments(.|\n)*on the stream"):
        arena.fill(torch.UntypedStorage(0), 64)


def test_every_buffer_gets_as_much_as_the_largest() -> None:
    _, _, registry = opened_alone()
    arena, storage = reserved(registry, 1, 64), torch.UntypedStorage(0)
    arena.fill(storage, 3)
    assert storage.nbytes() == 64


def test_a_new_arena_is_nobody_elses() -> None:
    _, _, registry = opened_alone()
    first, second, third = (registry.new_arena("gather", "a") for _ in range(3))
    assert [arena.name for arena in (first, second, third)] == ["a", "a #2", "a #3"]
    assert registry.arena("gather", "a") is first
    assert len({arena.pool.number for arena in (first, second, third)}) == 3


def test_an_arena_is_dropped_once_it_is_bound_to_nothing() -> None:
    _, _, registry = opened_alone()
    arena = reserved(registry, 1, 64)
    registry.bind(arena, [GATHER])
    with pytest.raises(ConfigError, match="bound to a communicator"):
        registry.drop(arena)
    registry.unbind(arena)
    registry.drop(arena)
    assert registry.new_arena("gather", arena.name).name == arena.name
    with pytest.raises(ConfigError, match="another registry"):
        registry.bind(arena, [GATHER])


def test_the_device_is_done_before_memory_is_registered_or_taken_away() -> None:
    backend, groups, registry = opened_alone()
    backend.quiesce = lambda: backend.log.append("quiesce")  # type: ignore[method-assign]
    arena = reserved(registry, 1, 64)
    registry.bind(arena, [GATHER])
    registry.unbind(arena)
    registry.bind(arena, [GATHER])
    groups.close()
    once = ["quiesce", "register 0 dp[gather]", "quiesce", "deregister 0 dp[gather]"]
    assert backend.log == once * 2


def test_a_device_that_fails_keeps_no_memory_registered() -> None:
    backend, groups, registry = opened_alone()
    arena = reserved(registry, 1, 64)
    registry.bind(arena, [GATHER])

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    backend.quiesce = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        groups.close()
    assert list(backend.registered()) == []
