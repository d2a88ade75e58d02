"""Where the parts of a workspace lie in symmetric memory, its allocation on all ranks or on none.

Sizes that cannot be are refused here. The barrier-free operations have memory of their own:
`pcomm.nvls.primitives.lamport` says how they work, and which operations cannot work like that.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcomm.core.control.agreement import vote
from pcomm.core.control.control import Control
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.group import Group
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.nvls._capability import DIST, MULTICAST, PEERS, Capability, reasons_by_rank
from pcomm.nvls.policy.table import MAX_BLOCKS
from pcomm.nvls.primitives.lamport_numbers import LAMPORT_SLOTS, NOTHING_HERE

__all__ = [
    "LAMPORT_BYTES",
    "LamportState",
    "Regions",
    "WorkspaceMemory",
    "check_memory",
    "check_numbers",
    "device_of",
    "lamport_region_bytes",
    "lamport_slot_bytes",
    "open_memory",
]


LAMPORT_BYTES = 128 * 1024
"""Room for what one rank sends to another in one operation, in bytes, unless told otherwise."""

_PAGE = 4096
# Kernels get the wait in ns, in 64 bits.
_LONGEST_WAIT_S = 1e9


@dataclass(frozen=True)
class Regions:
    """Byte offsets in the buffer of each rank: signals, slots, then the Lamport region.

    Args:
        world_size: Number of ranks.
        slot_bytes: Size of the largest tensor that an operation works on, in bytes.
        num_slots: Number of slots.
        lamport_region_bytes: Size of the region of the barrier-free operations, in bytes.
    """

    world_size: int
    slot_bytes: int
    num_slots: int
    lamport_region_bytes: int = 0

    @property
    def signal_bytes(self) -> int:
        """Size of the signals: a word of 4 bytes for each block and rank."""
        return _whole_pages(MAX_BLOCKS * self.world_size * 4)

    def slot(self, place: int) -> int:
        """Offset of a slot."""
        return self.signal_bytes + place * _whole_pages(self.slot_bytes)

    @property
    def lamport_region(self) -> int:
        """Offset of the Lamport region."""
        return self.slot(self.num_slots)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.lamport_region + _whole_pages(self.lamport_region_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def lamport_slot_bytes(world_size: int, lamport_bytes: int) -> int:
    """Size of a slot, in bytes: `lamport_bytes` in whole vectors from each rank."""
    return world_size * (lamport_bytes // 16 * 16)


def lamport_region_bytes(world_size: int, lamport_bytes: int) -> int:
    """Size of all slots, in bytes."""
    return LAMPORT_SLOTS * lamport_slot_bytes(world_size, lamport_bytes)


class LamportState:
    """Slots in the symmetric memory of this rank, and the words that count its operations. Local.

    Its operations run one after another on one stream of the device, in the same order on all
    ranks. They and the operations with barriers share no memory, so they may be mixed.

    Args:
        offset: Byte offset of the slots in the buffer: a multiple of 16.
        world_size: Number of ranks.
        lamport_bytes: Room for what one rank sends to another, in bytes.
        device: Device of the buffer.

    Attributes:
        words: Number of operations so far, ticket counter and number of vectors that the last one
            stored; int32 [3] on `device`. Kernels alone write them.
    """

    def __init__(
        self, offset: int, world_size: int, lamport_bytes: int, *, device: torch.device
    ) -> None:
        self.offset = offset
        self.slot_bytes = lamport_slot_bytes(world_size, lamport_bytes)
        self.num_bytes = lamport_region_bytes(world_size, lamport_bytes)
        self.words = torch.zeros(3, dtype=torch.int32, device=device)

    def clear(self, buffer: Tensor) -> None:
        """Mark all slots as empty, on the current stream.

        Before the first operation of any rank: all ranks clear, wait for their devices, and agree.

        Args:
            buffer: Buffer of this rank; uint8.
        """
        region = buffer[self.offset : self.offset + self.num_bytes].view(torch.int32)
        region.fill_(NOTHING_HERE - (1 << 32))

    def arguments(self) -> dict[str, Any]:
        """What kernels are told of the slots, by name."""
        return {"state": self.words, "region": self.offset, "slot_bytes": self.slot_bytes}


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
        lamport_bytes: Room for what one rank sends to another without a barrier, in bytes.
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
    level, reason, mine = DIST, "", None
    try:
        mine = _prepare(memory, group, regions, lamport_bytes)
        level, reason = _level(memory)
    except Exception as problem:  # any: the vote is what the other ranks wait for
        reason = _reason(problem)
    # Also an agreement that no rank signals before all have cleared their signals.
    found = vote(group, "nvls: memory", level, reason, control=control)
    below = [i for i, value in enumerate(found.values) if value < MULTICAST]
    reasons = reasons_by_rank([group.ranks[i] for i in below], [found.reasons[i] for i in below])
    if found.minimum == DIST:
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
    offset = regions.lamport_region
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
    # The second look, after `RankFacts.level`: a driver that reports multicast may give no address.
    if memory.device.type == "cuda" and memory.multicast_ptr is None:
        return PEERS, "torch's symmetric memory has no multicast address"
    return MULTICAST, ""


def check_numbers(max_bytes: int, slots: int, lamport_bytes: int, timeout_s: float) -> None:
    """Refuse sizes that are no integers or not above 0, and a time that is not, or without end."""
    for name, value in (
        ("max_bytes", max_bytes),
        ("slots", slots),
        ("lamport_bytes", lamport_bytes),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"Workspace: {name}={value!r}",
                found=f"a number of type {type(value).__name__}",
                why="Bytes and slots are counted.",
                fix=f"Pass {name} as an integer.",
            )
    for name, number in (("max_bytes", max_bytes), ("timeout_s", timeout_s)):
        if not (isinstance(number, (int, float)) and number > 0):
            raise ConfigError(
                f"Workspace: {name}={number!r}",
                found="no positive number",
                why="Memory and waits have a size.",
                fix=f"Pass {name} > 0.",
            )
    if timeout_s > _LONGEST_WAIT_S:
        raise ConfigError(
            f"Workspace: timeout_s={timeout_s}",
            found=f"more than {_LONGEST_WAIT_S:g} s",
            why="Kernels count the wait in ns, in 64 bits.",
            fix=f"Pass timeout_s <= {_LONGEST_WAIT_S:g}.",
        )
    if lamport_bytes < 0:
        raise ConfigError(
            f"Workspace: lamport_bytes={lamport_bytes}",
            found="a negative number",
            why="It is the size of memory.",
            fix="Pass 0 for a workspace without operations that have no barrier.",
        )


def device_of(device: torch.device | str) -> torch.device:
    """A device, or that of a name. Local."""
    try:
        found = torch.device(device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("this process has no CUDA device")
        return found
    except (RuntimeError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"Workspace: device={device!r}",
            found=f"{type(error).__name__}: {first_line}",
            why="Tensors are on a device that torch has here.",
            fix='Pass a torch.device, or a name such as "cuda:0" or "cpu".',
        ) from None


def check_memory(max_bytes: int, num_bytes: int, device: torch.device) -> None:
    """Refuse what this rank can never have, and what all would do without. Local.

    Args:
        max_bytes: Size of the largest tensor, in bytes.
        num_bytes: Size of the memory of this rank, in bytes.
        device: Device of the memory.
    """
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elif torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        return
    if num_bytes > total:
        raise ConfigError(
            f"Workspace: max_bytes={max_bytes}",
            found=f"{num_bytes} bytes for this rank, whose device has {total}",
            why="The slots would fit nowhere, and every operation take torch.distributed.",
            fix="Pass the size of the largest tensor in bytes, such as 8 << 20.",
        )
