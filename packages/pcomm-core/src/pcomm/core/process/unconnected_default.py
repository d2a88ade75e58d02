"""A default process group without connections, for processes that meet in a store of their own.

Functions of torch.distributed ask the default process group for the rank of this process, also
those that make and describe other groups. One that torch makes itself connects all ranks, so that
a process that comes later cannot join it, and one that is gone breaks it. The group made here has
a rank and a size, and neither backend, threads nor connections.

It is private to torch how such a group is put in place, so this file is the only one that does it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["end_if_unused", "is_connected", "unconnected_default"]

_NAME = "pcomm: a default group without connections"

# State of this module, since torch has one default group a process and its groups take no
# attributes: the threads that make communicators now, for which the group must not end.
_lock = threading.Lock()
_makers: set[int] = set()


def is_connected() -> bool:
    """Whether torch.distributed has a default group by which ranks can communicate. Local."""
    return dist.is_available() and dist.is_initialized() and not _is_ours()


@contextmanager
def unconnected_default(store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """Have a default group while communicators are made in the block, and as long as they live.

    Local. Where there is one, connected or not, nothing happens. `end_if_unused` ends it.

    Args:
        store: Store in which ranks meet; what torch calls the default store.
        rank: Global rank of this process.
        size: Number of global ranks; larger than each of them.
    """
    maker = threading.get_ident()
    try:
        with _lock:
            _makers.add(maker)
            if not dist.is_initialized():
                _begin(store, rank, size)
        yield
    finally:
        with _lock:
            _makers.discard(maker)
        end_if_unused()


def end_if_unused() -> None:
    """End the default group without connections if no other is there or being made. Local."""
    world = distributed_c10d._world
    with _lock:
        if _makers or not (dist.is_initialized() and _is_ours()) or len(world.pg_map) > 1:
            return
        default = distributed_c10d._get_default_group()
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(default, None)
        distributed_c10d._update_default_pg(None)


def _is_ours() -> bool:
    default = distributed_c10d._get_default_group()
    return distributed_c10d._world.pg_names.get(default) == _NAME


def _begin(store: dist.Store, rank: int, size: int) -> None:
    group = dist.ProcessGroup(store, rank, size)
    group._set_group_name(_NAME)  # type: ignore[arg-type]
    group._set_group_desc(_NAME)
    world = distributed_c10d._world
    # As `init_process_group` does. The registry of names, by which operators of compiled code find
    # their group, has no entry: there is nothing that it could do.
    world.pg_map[group] = (dist.Backend.UNDEFINED, store)
    world.pg_names[group] = _NAME  # type: ignore[assignment]
    world.pg_group_ranks[group] = {r: r for r in range(size)}
    world.pg_backend_config[group] = dist.Backend.UNDEFINED
    distributed_c10d._update_default_pg(group)
