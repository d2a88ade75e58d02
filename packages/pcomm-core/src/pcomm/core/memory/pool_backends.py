"""Backends of memory pools: their interface, that of NCCL, and one without a GPU."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.group import Group

__all__ = [
    "FakeCommunicator",
    "FakePool",
    "FakePools",
    "NcclPools",
    "PoolBackend",
    "PoolCommunicator",
]


@dataclass(frozen=True)
class PoolCommunicator:
    """A communicator that memory is registered with.

    Args:
        uid: Name of the communicator; two groups that share one have the same.
        ranks: Global ranks of its members.
        registrar: Object with `register_mem_pool(pool, symm)` and `deregister_mem_pool(pool)` of
            torch's semantics; see `pcomm.core.memory.pool_backends`.
    """

    uid: str
    ranks: tuple[int, ...]
    registrar: Any


class PoolBackend(Protocol):
    """Pools and communicators of one kind of device. Everything here is local."""

    def new_pool(self) -> Any:
        """An empty pool."""
        ...

    def allocating(self, pool: Any) -> AbstractContextManager[Any]:
        """A `with` block in which tensors are made in `pool`."""
        ...

    def segments(self, pool: Any) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every segment of `pool`, in the order of their registration."""
        ...

    def address(self, pool: Any, storage: torch.UntypedStorage) -> int:
        """Where the memory lies that `storage` has just got within `allocating(pool)`."""
        ...

    def quiesce(self) -> None:
        """Return when the device has done all that it was given."""
        ...

    def communicator(self, group: Group) -> PoolCommunicator | None:
        """The communicator of `group`; None for a group that has none.

        Raises:
            UnsupportedError: The communicator cannot register memory.
        """
        ...


class NcclPools:
    """The `PoolBackend` of torch's `ProcessGroupNCCL` and `torch.cuda.MemPool`. Local.

    The communicator of a group has to be initialised before memory is registered with it: by one
    collective, or by a `device_id` given to `init_process_group`.

    Args:
        group: Any group on NCCL; pools get their memory from its allocator.

    Raises:
        UnsupportedError: Its communicator cannot register memory, or there is none.
    """

    def __init__(self, group: Group) -> None:
        communicator = self.communicator(group)
        if communicator is None:
            raise _unsupported(group, "a group of one rank, without a communicator")
        self._allocator: Any = communicator.registrar.mem_allocator

    def new_pool(self) -> torch.cuda.MemPool:
        """An empty pool of memory that NCCL allocates."""
        return torch.cuda.MemPool(self._allocator)

    def allocating(self, pool: torch.cuda.MemPool) -> AbstractContextManager[Any]:
        """Tensors made on this thread are made in `pool`."""
        return torch.cuda.use_mem_pool(pool)

    def segments(self, pool: torch.cuda.MemPool) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every segment, in the order of the snapshot, as torch goes."""
        return tuple((segment["address"], segment["total_size"]) for segment in pool.snapshot())

    def address(self, pool: torch.cuda.MemPool, storage: torch.UntypedStorage) -> int:
        """That of the storage itself."""
        return storage.data_ptr()

    def quiesce(self) -> None:
        """Wait for all streams of this rank's device."""
        torch.cuda.synchronize()

    def communicator(self, group: Group) -> PoolCommunicator | None:
        """That of `group`; None for one rank without a communicator."""
        process_group = group.process_group
        if process_group is None:
            return None
        if "nccl" not in dist.get_backend(process_group):
            raise _unsupported(group, f"a communicator of {dist.get_backend(process_group)}")
        registrar = process_group._get_backend(torch.device("cuda"))
        # A backend without them raises AttributeError half-way (pytorch #191951).
        if not hasattr(registrar, "register_mem_pool"):
            raise _unsupported(group, f"{type(registrar).__name__} without register_mem_pool")
        return PoolCommunicator(process_group.group_name, group.ranks, registrar)


def _unsupported(group: Group, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"pools: memory for group {group.key}",
        found=found,
        why="Only torch's ProcessGroupNCCL registers memory with a communicator.",
        fix="Open the group with backend 'nccl' on a build of torch that has register_mem_pool.",
    )


@dataclass
class FakePool:
    """Memory that is only numbers: address and bytes of each segment.

    Storages are real ones with memory elsewhere, and have a place here for as long as they have
    any.
    """

    number: int
    segments: dict[int, int] = field(default_factory=dict)
    _places: list[tuple[weakref.ref[torch.UntypedStorage], int, int]] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        """Add a segment and return its address."""
        address = (self.number + 1) << 48
        for start, size in self.segments.items():
            address = max(address, start + size)
        self.segments[address] = num_bytes
        return address

    def place(self, storage: torch.UntypedStorage) -> int:
        """The address of the first gap that is large enough, else of a new segment."""
        num_bytes, kept = storage.nbytes(), []
        for known in self._places:
            other = known[0]()
            if other is not None and other is not storage and other.nbytes():
                kept.append(known)
        address = self._gap(num_bytes, sorted((start, size) for _, start, size in kept))
        if address is None:
            address = self.allocate(num_bytes)
        self._places = [*kept, (weakref.ref(storage), address, num_bytes)]
        return address

    def _gap(self, num_bytes: int, taken: list[tuple[int, int]]) -> int | None:
        for segment, length in self.segments.items():
            begin, end = segment, segment + length
            for start, size in taken:
                if segment <= start < end:
                    if start - begin >= num_bytes:
                        return begin
                    begin = start + size
            if end - begin >= num_bytes:
                return begin
        return None


@dataclass
class FakeCommunicator:
    """A fake of `ProcessGroupNCCL`, with its semantics for pools.

    Args:
        name: Name in errors and in the log.
        log: Calls of all communicators of a backend, in order.
        is_ready: True from its initialisation until it is closed.
        refused: Addresses that NCCL cannot register.
    """

    name: str
    log: list[str] = field(default_factory=list)
    is_ready: bool = True
    refused: Collection[int] = ()
    pools: set[int] = field(default_factory=set)
    segments: dict[int, int] = field(default_factory=dict)

    def register_mem_pool(self, pool: FakePool, symm: bool = False) -> None:
        """Note the pool, then register what is not registered yet."""
        self._enter("register", pool)
        self.pools.add(pool.number)
        for address, num_bytes in pool.segments.items():
            if address in self.segments:
                continue
            if address in self.refused:
                raise RuntimeError(f"{self.name}: NCCL cannot register segment {address:#x}")
            self.segments[address] = num_bytes

    def deregister_mem_pool(self, pool: FakePool) -> None:
        """Forget the pool, then each segment; the first that is missing is an error."""
        self._enter("deregister", pool)
        if pool.number not in self.pools:
            raise RuntimeError(f"{self.name}: pool {pool.number} was not registered before")
        self.pools.remove(pool.number)
        for address in pool.segments:
            if address not in self.segments:
                raise RuntimeError(f"{self.name}: segment {address:#x} is not registered")
            del self.segments[address]

    def _enter(self, what: str, pool: FakePool) -> None:
        self.log.append(f"{what} {pool.number} {self.name}")
        if not self.is_ready:
            raise RuntimeError(f"{self.name}: the communicator is not initialised")


class FakePools:
    """The `PoolBackend` of fakes: one communicator for each key of a group.

    Attributes:
        communicators: Communicators by key of the group; put one under two keys to share it.
        log: Every call of register and deregister, in order.
    """

    def __init__(self) -> None:
        self.communicators: dict[str, FakeCommunicator] = {}
        self.log: list[str] = []
        self._numbers = itertools.count()

    def new_pool(self) -> FakePool:
        """An empty pool."""
        return FakePool(next(self._numbers))

    def allocating(self, pool: FakePool) -> AbstractContextManager[FakePool]:
        """The pool itself, whose `allocate` adds segments; storages get a place by `address`."""
        return contextlib.nullcontext(pool)

    def segments(self, pool: FakePool) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every segment, oldest first."""
        return tuple(pool.segments.items())

    def address(self, pool: FakePool, storage: torch.UntypedStorage) -> int:
        """Where `storage` would lie if memory of CPUs could be had from a pool."""
        return pool.place(storage)

    def quiesce(self) -> None:
        """There is no device to wait for."""

    def communicator(self, group: Group) -> PoolCommunicator:
        """That of the group's key, made when it is asked for first."""
        made = self.communicators.setdefault(group.key, FakeCommunicator(group.key, log=self.log))
        return PoolCommunicator(made.name, group.ranks, made)

    def registered(self) -> Iterator[tuple[str, int]]:
        """Name and address of all that is registered now."""
        for communicator in {id(c): c for c in self.communicators.values()}.values():
            yield from ((communicator.name, address) for address in communicator.segments)
