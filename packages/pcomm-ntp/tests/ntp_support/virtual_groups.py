"""The groups of a plan between threads of one process: any topology, without start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.control import Control
from pcomm.core.groups.group import Closing, Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.core.testing.virtual import VirtualCollectives, run_threads
from pcomm.core.topology import Topology

__all__ = ["run_on_virtual_groups"]


def run_on_virtual_groups(
    topology: Topology, specs: Sequence[GroupSpec], function: Callable[[int, Groups], Any]
) -> dict[int, Any]:
    """What `function(rank, groups)` returns on a thread for each rank that has not failed.

    Each operation ends only when all ranks of its group have called it, also if it is started
    without waiting: so an order that differs between ranks does not end, on any backend. The
    collectives of each group are `SpyCollectives`.

    Args:
        topology: Topology; its failed ranks have no thread.
        specs: Groups of explicit ranks.
        function: Task of a rank.

    Raises:
        Exception: The first error of a rank that is not a consequence of another one's.
    """
    ranks = [rank for rank in topology.ranks if rank not in topology.failed]
    wait_s = scaled_s(PATIENCE_S)
    store = dist.HashStore()
    meetings: dict[str, _Meeting] = {}
    for spec in specs:
        size = len(spec.ranks or ())
        meetings[spec.axes] = _Meeting([None] * size, threading.Barrier(size, timeout=wait_s))

    def run(rank: int) -> Any:
        control = Control(store, ranks, rank, timeout_s=wait_s)
        with _groups_of(rank, topology, specs, meetings, control) as groups:
            return function(rank, groups)

    return run_threads(run, ranks, [one.barrier for one in meetings.values()])


class _Meeting(NamedTuple):
    """Where the threads of a group hand tensors to each other."""

    table: list[Any]
    barrier: threading.Barrier


def _groups_of(
    rank: int,
    topology: Topology,
    specs: Sequence[GroupSpec],
    meetings: Mapping[str, _Meeting],
    control: Control,
) -> Groups:
    """The groups of which a rank is a member."""
    closing, found = Closing(), []
    for spec in specs:
        members = spec.ranks or ()
        if rank not in members:
            continue
        place, among = members.index(rank), control.among(members)
        group = Group(spec.axes, members, None, rank=place, closing=closing, control=among)
        inner: Collectives = group.collectives
        if len(members) > 1:
            inner = VirtualCollectives(place, len(members), *meetings[spec.axes])
        found.append(group.with_collectives(SpyCollectives(inner)))
    return Groups(found, topology=topology, closing=closing, control=control)
