"""Torch's process groups: made under a name that their members agreed on, shared, and closed.

Ranks match the operations of a communicator by their order. What keeps that order on one rank (the
tags of messages, the queue of large operations) therefore belongs to the communicator, and every
`Group` around it shares it, however many there are and wherever the process group was made.

`torch.distributed.new_group` names a group made by its members alone after their ranks and the
number of groups that the process already has, and its members find each other in the store
under that name. Members that own different numbers of groups then wait for each other under
different names, and a group that is opened again after a close finds the addresses of the first
one. With a name of ours neither happens. The function beneath `new_group` takes a name; it is
private to torch, so this file is the only one that calls it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.backend import new_collectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.rank_sets import spelled
from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups.connecting_store import ConnectingStore
from pcomm.core.groups.never_freed import never_freed
from pcomm.core.groups.options import Granted
from pcomm.core.groups.own_connections import OwnConnections
from pcomm.core.process.unconnected_default import end_if_unused, unconnected_default

__all__ = [
    "Communicator",
    "abandon_communicator",
    "close_communicator",
    "communicator_of",
    "new_communicator",
]


class Communicator:
    """One torch process group with its collectives. Made by `communicator_of` alone.

    It holds the process group weakly: the owner, torch's registry for most, decides how long it
    lives, and a forgotten handle keeps no connections and no threads.

    Attributes:
        collectives: Operations without gradients.
        differentiable: Operations with gradients.
        connections: Connections of its own; none where they are not known.
        found_in: Store in which its members found each other, if it is not that of the caller.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.connections = OwnConnections()
        self.found_in: ConnectingStore | None = None
        self._inner = new_collectives(process_group)
        self.collectives: Collectives = self._inner
        self.differentiable: Collectives = differentiable(self._inner)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group.

        Raises:
            ClosedError: It was closed.
        """
        return self._inner.process_group

    def rest(self) -> None:
        """End threads that have nothing to do; the next operation begins one again. Local."""
        self._inner.rest()

    def close(self) -> None:
        """Refuse all further operations and end the thread of the queue. Local."""
        self._inner.close()

    def abandon(self) -> None:
        """Refuse all further operations, and to wait for those in flight. Local."""
        self._inner.abandon()


# Torch's process groups take no attributes, so what belongs to one is kept beside it: as long as
# the process group lives, and no longer.
_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def communicator_of(process_group: dist.ProcessGroup) -> Communicator:
    """The communicator of a process group, the same one at each call. Local.

    Args:
        process_group: A group that this rank belongs to.
    """
    found = _communicators.get(process_group)
    if found is None:
        found = _communicators[process_group] = Communicator(process_group)
    return found


def new_communicator(
    name: str,
    ranks: Sequence[int],
    granted: Granted,
    *,
    store: dist.Store,
    rank: int,
    description: str,
    connect_s: float = math.inf,
) -> dist.ProcessGroup:
    """A communicator of `ranks`, owned by the caller. Collective: its members call it, no others.

    Args:
        name: Name that is the same on all members, and never used before in this job.
        ranks: Global ranks, ascending.
        granted: Backend and options.
        store: Store in which the members find each other.
        rank: Global rank of this process, one of `ranks`.
        description: Name in torch's own reports.
        connect_s: Seconds to wait for members to connect, on gloo; at most the limit of operations.

    Raises:
        PeerTimeoutError: A member did not come to connect.
        RuntimeError: Torch's, if a member failed while it connected.
    """
    make = partial(_new_process_group, name, ranks, granted, rank, description)
    with unconnected_default(store, rank, 1 + ranks[-1]):
        if granted.backend.startswith("gloo"):
            return _connected(make, store, connect_s, f"{description}: ranks {spelled(ranks)}")
        return make(store)


def _connected(
    make: Callable[[dist.Store], dist.ProcessGroup],
    store: dist.Store,
    connect_s: float,
    asked: str,
) -> dist.ProcessGroup:
    """A group that connects when it is made, with its connections; `asked` is for the message."""
    found_in = ConnectingStore(store, connect_s)
    try:
        with OwnConnections.recorded() as connections:
            made = make(found_in)
    except RuntimeError as problem:
        if found_in.timed_out_s is None:
            raise
        raise PeerTimeoutError(
            asked,
            found=f"a rank did not come to connect within {found_in.timed_out_s:g} s",
            why="Each member of a communicator connects to every other one.",
            fix="Look for an error of one of these ranks; raise PCOMM_TIMEOUT_S if they are slow.",
        ) from problem
    found_in.lift()
    communicator = communicator_of(made)
    communicator.found_in, communicator.connections = found_in, connections
    return made


def _new_process_group(
    name: str,
    ranks: Sequence[int],
    granted: Granted,
    rank: int,
    description: str,
    store: dist.Store,
) -> dist.ProcessGroup:
    backend = dist.Backend(granted.backend)
    timeout = granted.timeout or distributed_c10d._get_default_timeout(backend)
    if granted.pg_options is not None:
        # Torch warns where the two differ.
        granted.pg_options._timeout = timeout
    is_nccl = "nccl" in granted.backend
    with _without_splitting(distributed_c10d._get_default_group()) as device:
        if is_nccl and device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]
            backend_options=granted.pg_options,
            timeout=timeout,
            # With it NCCL connects here and not in the first operation, so that a network which
            # does not work, or a rank that is gone, is known when groups open. Gloo has no device.
            device_id=device if is_nccl else None,
            group_desc=description,
        )
    assert isinstance(made, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[made] = {r: i for i, r in enumerate(ranks)}
    return made


def close_communicator(process_group: dist.ProcessGroup) -> None:
    """Close a group of `new_communicator`, unless torch.distributed has ended since. Collective."""
    communicator_of(process_group).close()
    # Torch's registry: empty after its end, and without this one after a new beginning.
    if process_group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(process_group)
        end_if_unused()


def abandon_communicator(process_group: dist.ProcessGroup) -> None:
    """Refuse its operations and leave it behind, operations in flight included. Local.

    Torch forgets it, as `destroy_process_group` does, so that torch's end of the default group does
    not meet it. Its destructor waits for operations in flight. Where its connections are known
    they are shut down, which ends all of these, and a thread runs the destructor; where they are
    not, it never runs.
    """
    communicator = communicator_of(process_group)
    # The queue's thread ends if it has nothing to do, and is not waited for otherwise.
    communicator.abandon()
    _forget(process_group)
    if not communicator.connections:
        never_freed([process_group, communicator])
        return
    communicator.connections.shut_down()
    # The thread has the last reference, unless the caller keeps one.
    held = [process_group]
    del process_group
    threading.Thread(target=held.clear, name="pcomm freeing", daemon=True).start()


def _forget(process_group: dist.ProcessGroup) -> None:
    """Have torch forget a group that it still knows, without ending it."""
    world = distributed_c10d._world
    if process_group not in world.pg_map:
        return
    tag = world.pg_to_tag.pop(process_group, None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_coalesce_state,
    ):
        table.pop(process_group, None)
    # Under its own tag, and under none where torch has chosen that tag.
    for tagged in (tag or "", ""):
        if process_group in world.tags_to_pg.get(tagged, []):
            world.tags_to_pg[tagged].remove(process_group)
    distributed_c10d._unregister_process_group(process_group.group_name)
    end_if_unused()


@contextmanager
def _without_splitting(default: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """Make torch open connections of their own for a new group; yields the device of the default.

    With a device bound to the default group, torch splits new NCCL groups off that group's
    communicator, and then every rank of it has to take part, members or not. Here only the members
    do: others may belong to another topology, or have failed.
    """
    device: torch.device | None = default.bound_device_id
    if device is None:
        yield None
        return
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device
