"""Memory that is reserved once and reused, on the fake and on a model of torch's allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


MIB = 1 << 20


@dataclass
class CachingAllocator:
    """One pool of torch's caching allocator: best fit, split, merge, and segments by size.

    Written from its documentation and its constants, to have something that a reservation can fail
    on: 512 bytes of rounding, segments of 2 MiB for up to 1 MiB, of 20 MiB for less than 10 MiB,
    and of whole 2 MiB above; a rest is split off from 512 bytes on, for large blocks above 1 MiB.
    """

    segments: list[int] = field(default_factory=list)
    blocks: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """Segment, offset, bytes, and whether it is free; in order."""

    def allocate(self, num_bytes: int) -> tuple[int, int]:
        size = -(-num_bytes // 512) * 512
        is_small = size <= MIB
        fits = [
            block
            for block in self.blocks
            if block[3] and block[2] >= size and (self.segments[block[0]] == 2 * MIB) == is_small
        ]
        if not fits:
            length = 2 * MIB if is_small else 20 * MIB
            if size >= 10 * MIB:
                length = -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append(length)
            fits = [(len(self.segments) - 1, 0, length, True)]
            self.blocks += fits
        segment, offset, length, _ = block = min(fits, key=lambda block: (block[2], block))
        self.blocks.remove(block)
        rest = length - size
        if rest >= 512 if is_small else rest > MIB:
            self.blocks.append((segment, offset + size, rest, True))
            length = size
        self.blocks.append((segment, offset, length, False))
        return segment, offset

    def free(self, place: tuple[int, int]) -> None:
        merged: list[tuple[int, int, int, bool]] = []
        for block in sorted(self.blocks):
            if block[:2] == place:
                block = (*block[:3], True)
            last = merged[-1] if merged else None
            if last and last[3] and block[3] and last[0] == block[0]:
                merged[-1] = (last[0], last[1], last[2] + block[2], True)
            else:
                merged.append(block)
        self.blocks = merged


sizes = st.one_of(
    st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(9 * MIB, 50 * MIB)
)


@given(st.integers(1, 7), sizes, st.lists(st.integers(0, 20), max_size=40))
def test_buffers_of_one_size_always_find_room_again(
    count: int, size: int, choices: list[int]
) -> None:
    """In whatever order they come and go; the reason why all buffers of an arena have one size."""
    allocator = CachingAllocator()
    held = [allocator.allocate(size) for _ in range(count)]
    segments = list(allocator.segments)
    for place in held:
        allocator.free(place)
    live: list[tuple[int, int]] = []
    for choice in choices:
        if len(live) == count or (live and choice % 2):
            allocator.free(live.pop(choice % len(live)))
        else:
            live.append(allocator.allocate(size))
            assert len(set(live)) == len(live)
        assert allocator.segments == segments


def test_buffers_of_two_sizes_do_not() -> None:
    """There was room for two small ones and two large ones, and then not for one and two."""
    allocator = CachingAllocator()
    small, large = 3 * MIB, 11 * MIB
    for place in [allocator.allocate(size) for size in (small, small, large, large)]:
        allocator.free(place)
    assert allocator.segments == [20 * MIB, 12 * MIB]
    for size in (small, large, large):
        allocator.allocate(size)
    assert allocator.segments == [20 * MIB, 12 * MIB, 12 * MIB]
