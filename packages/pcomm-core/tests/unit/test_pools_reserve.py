"""Memory that is reserved once and reused, on the fake."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import FakePools
from pcomm.core.memory.pools import Arena, PoolRegistry

GATHER = Group("dp", (0,), None, role="gather")
CONTROL = Group("dp", (0,), None, role="control")
CPU = torch.device("cpu")


def opened() -> tuple[FakePools, Groups, PoolRegistry]:
    backend, groups = FakePools(), Groups([GATHER, CONTROL])
    return backend, groups, PoolRegistry(groups, CONTROL, backend)


def reserved(registry: PoolRegistry, count: int, num_bytes: int) -> Arena:
    arena = registry.new_arena("gather", "weights")
    arena.reserve(count, num_bytes, CPU)
    return arena


def test_what_comes_and_goes_stays_in_what_is_registered() -> None:
    backend, _, registry = opened()
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
    _, _, registry = opened()
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
    backend, _, registry = opened()
    arena = reserved(registry, 2, 64)
    backend.address = lambda pool, storage: pool.allocate(64)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"in none of the 2 segments"):
        arena.fill(torch.UntypedStorage(0), 64)


def test_every_buffer_gets_as_much_as_the_largest() -> None:
    _, _, registry = opened()
    arena, storage = reserved(registry, 1, 64), torch.UntypedStorage(0)
    arena.fill(storage, 3)
    assert storage.nbytes() == 64


def test_a_new_arena_is_nobody_elses() -> None:
    _, _, registry = opened()
    first, second, third = (registry.new_arena("gather", "a") for _ in range(3))
    assert [arena.name for arena in (first, second, third)] == ["a", "a #2", "a #3"]
    assert registry.arena("gather", "a") is first
    assert len({arena.pool.number for arena in (first, second, third)}) == 3


def test_an_arena_is_dropped_once_it_is_bound_to_nothing() -> None:
    _, _, registry = opened()
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
    backend, groups, registry = opened()
    backend.quiesce = lambda: backend.log.append("quiesce")  # type: ignore[method-assign]
    arena = reserved(registry, 1, 64)
    registry.bind(arena, [GATHER])
    registry.unbind(arena)
    registry.bind(arena, [GATHER])
    groups.close()
    once = ["quiesce", "register 0 dp[gather]", "quiesce", "deregister 0 dp[gather]"]
    assert backend.log == once * 2


def test_a_device_that_fails_keeps_no_memory_registered() -> None:
    backend, groups, registry = opened()
    arena = reserved(registry, 1, 64)
    registry.bind(arena, [GATHER])

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    backend.quiesce = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        groups.close()
    assert list(backend.registered()) == []
