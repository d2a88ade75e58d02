"""The memory of a workspace: on all ranks, or on none of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from pcomm.core.control.control import Control
from pcomm.core.errors import PcommError
from pcomm.core.groups.agreement import vote
from pcomm.core.groups.group import Group
from pcomm.core.memory.symmetric.symmetric_memory import SymmetricMemory
from pcomm.nvls._capability import Capability, reasons_by_rank
from pcomm.nvls.hardware.rank_facts import MULTICAST, NOTHING, PEERS
from pcomm.nvls.workspace.lamport import LamportState
from pcomm.nvls.workspace.regions import MAX_BLOCKS, Regions

__all__ = ["WorkspaceMemory", "open_memory"]


@dataclass(frozen=True)
class WorkspaceMemory:
    """What the kernels of a workspace use on this rank.

    Args:
        symmetric: Memory that all ranks reach.
        epochs: Words of this rank alone: int32, that of a failure, then one a block.
        lamport: State of the barrier-free operations.
        failure: Word that the host reads without asking the device, also after that has stopped:
            int32, place of a missing rank plus 1.
    """

    symmetric: SymmetricMemory
    epochs: torch.Tensor
    lamport: LamportState
    failure: torch.Tensor

    @property
    def failure_word(self) -> ctypes.c_int32:
        """`failure` as the host reads it at no cost."""
        return ctypes.c_int32.from_address(self.failure.data_ptr())


def open_memory(
    group: Group,
    regions: Regions,
    lamport_bytes: int,
    device: torch.device,
    capability: Capability,
    control: Control | None,
) -> tuple[WorkspaceMemory | None, Capability]:
    """Allocate on all ranks, or on none. Collective; raises for no lack.

    Args:
        group: Ranks that share the memory.
        regions: Places in it.
        lamport_bytes: Size of the largest tensor of a barrier-free operation, in bytes.
        device: Device of the memory.
        capability: Capability that the ranks have voted for.
        control: Control by which the ranks agree; by default that of `group`.

    Returns:
        The memory, or None; and what the ranks can really do, with reasons.
    """
    try:
        memory = SymmetricMemory.open(group, regions.num_bytes, device=device, control=control)
    except Exception as problem:  # any: each rank has one, and the others go on, too
        return None, capability.without_memory(_reason(problem))
    level, reason, mine = NOTHING, "", None
    try:
        mine = _prepare(memory, group, regions, lamport_bytes)
        level, reason = _level(memory)
    except Exception as problem:  # any: the vote is what the other ranks wait for
        reason = _reason(problem)
    # Also an agreement that no rank signals before all have cleared their signals.
    found = vote(group, "nvls: memory", level, reason, control=control)
    below = [i for i, value in enumerate(found.values) if value < MULTICAST]
    reasons = reasons_by_rank([group.ranks[i] for i in below], [found.reasons[i] for i in below])
    if found.minimum == NOTHING:
        memory.close()
        return None, capability.without_memory(reasons)
    if found.minimum == PEERS and capability.multicast:
        capability = capability.without_multicast(reasons)
    return mine, capability


def _reason(problem: Exception) -> str:
    if isinstance(problem, PcommError):
        # What another rank has found comes with its advice, in further lines.
        text = f"{problem.asked}: {problem.found}"
    else:
        text = f"{type(problem).__name__}: {problem}"
    return text.partition("\n")[0]


def _prepare(
    memory: SymmetricMemory, group: Group, regions: Regions, lamport_bytes: int
) -> WorkspaceMemory:
    offset = regions.low_latency
    lamport = LamportState(offset, group.size, lamport_bytes, device=memory.device)
    lamport.clear(memory.buffer())
    memory.buffer()[: regions.signal_bytes].zero_()
    on_cuda = memory.device.type == "cuda"
    made = WorkspaceMemory(
        memory,
        torch.zeros(1 + MAX_BLOCKS, dtype=torch.int32, device=memory.device),
        lamport,
        torch.zeros(1, dtype=torch.int32, pin_memory=on_cuda),
    )
    if on_cuda:
        torch.cuda.synchronize(memory.device)
    return made


def _level(memory: SymmetricMemory) -> tuple[int, str]:
    # The address is known only now: a driver that reports multicast may still give none.
    if memory.device.type == "cuda" and memory.multicast_ptr is None:
        return PEERS, "torch's symmetric memory has no multicast address"
    return MULTICAST, ""
