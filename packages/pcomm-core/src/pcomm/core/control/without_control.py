"""The control where the caller gives none: ranks of torch.distributed, in its store.

Also a default process group without connections, for processes that meet in a store of their own:
functions of torch.distributed ask the default process group for the rank of this process, also
those that make and describe other groups. One that torch makes itself connects all ranks, so that
a process that comes later cannot join it, and one that is gone breaks it. The group made here has
a rank and a size, and neither backend, threads nor connections. It is private to torch how such a
group is put in place, so this file is the only one that does it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.control.control import Control
from pcomm.core.errors import ConfigError

__all__ = [
    "RanksOfGroup",
    "control_of_group",
    "default_control",
    "end_if_unused",
    "is_connected",
    "unconnected_default",
]


_NAME = "pcomm: a default group without connections"
# State of this module, since torch has one default group a process and its groups take no
# attributes: the threads that make communicators now, for which the group must not end.
_lock = threading.Lock()
_makers: set[int] = set()


def default_control(ranks: Sequence[int] | None = None) -> Control:
    """The control of `ranks` of torch.distributed, by default all of them; generation 0. Local.

    Raises:
        ConfigError: torch.distributed has not begun, or has ended.
        TopologyError: This process is not one of `ranks`.
    """
    if not is_connected():
        raise ConfigError(
            "default_control",
            found="torch.distributed is not initialised",
            why="Ranks meet in a store, and without a Control it is that of torch.distributed.",
            fix="Call it between init_process_group and destroy_process_group, or give a Control.",
        )
    chosen = range(dist.get_world_size()) if ranks is None else ranks
    return Control(distributed_c10d._get_default_store(), chosen, dist.get_rank())


def control_of_group(group: RanksOfGroup, control: Control | None = None) -> Control:
    """The control of the ranks of a group: a part of `control`, its own, or the default one. Local.

    Raises:
        ConfigError: torch.distributed has not begun, or has ended.
        TopologyError: A rank of the group is not in `control`.
    """
    if control is not None:
        return control.among(group.ranks)
    if group.control is not None:
        return group.control
    if group.size == 1:
        return Control(None, group.ranks, group.ranks[0])
    return default_control(group.ranks)


class RanksOfGroup(Protocol):
    """What agreement needs of a `Group`, which itself is made by agreement."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def key(self) -> str:
        """Name and role as one word."""

    @property
    def control(self) -> Control | None:
        """Control by which its ranks agree; None for that of torch.distributed."""


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
