"""The groups of a plan between threads of one process: any topology, without start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.collectives.spy import SpyCollectives
from pcomm.core.control.control import Control
from pcomm.core.groups.closing import Closing
from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing.patience import PATIENCE_S, scaled_s
from pcomm.core.testing.virtual import VirtualCollectives
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
    store, wait_s = dist.HashStore(), scaled_s(PATIENCE_S)
    meeting: dict[str, tuple[threading.Barrier, list[Any]]] = {}
    for spec in specs:
        size = len(spec.ranks or ())
        meeting[spec.axes] = threading.Barrier(size, timeout=wait_s), [None] * size
    results: dict[int, Any] = {}
    causes: list[BaseException] = []
    consequences: list[BaseException] = []

    def groups_of(rank: int) -> Groups:
        control, closing = Control(store, ranks, rank, timeout_s=wait_s), Closing()
        found = []
        for spec in specs:
            members = spec.ranks or ()
            if rank not in members:
                continue
            place = members.index(rank)
            group = Group(
                *(spec.axes, members, None),
                rank=place,
                closing=closing,
                control=control.among(members),
            )
            inner: Collectives = group.collectives
            if len(members) > 1:
                barrier, table = meeting[spec.axes]
                inner = VirtualCollectives(place, len(members), table, barrier)
            found.append(group.with_collectives(SpyCollectives(inner)))
        return Groups(found, topology=topology, closing=closing, control=control)

    def run(rank: int) -> None:
        try:
            with groups_of(rank) as groups:
                results[rank] = function(rank, groups)
        except threading.BrokenBarrierError as problem:
            consequences.append(problem)
        except BaseException as problem:  # handed to the caller's thread below
            causes.append(problem)
            for barrier, _ in meeting.values():
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in causes + consequences:
        raise error
    return results
