"""The memory of the barrier-free operations, and what their kernels are told of it.

`pcomm.nvls.primitives.lamport` says how they work, and which operations cannot work like that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcomm.nvls.primitives.lamport_numbers import LAMPORT_SLOTS, NOTHING_HERE

__all__ = [
    "LAMPORT_BYTES",
    "LAMPORT_SLOTS",
    "LamportState",
    "lamport_region_bytes",
    "lamport_slot_bytes",
]

LAMPORT_BYTES = 128 * 1024
"""Room for what one rank sends to another in one operation, in bytes, unless told otherwise."""


def lamport_slot_bytes(world_size: int, max_bytes: int) -> int:
    """Size of a slot, in bytes: a segment of `max_bytes`, cut to whole vectors, for each rank."""
    return world_size * (max_bytes // 16 * 16)


def lamport_region_bytes(world_size: int, max_bytes: int) -> int:
    """Size of the memory that each rank needs, in bytes."""
    return LAMPORT_SLOTS * lamport_slot_bytes(world_size, max_bytes)


class LamportState:
    """Slots in the symmetric memory of this rank, and the words that count its operations. Local.

    Its operations run one after another on one stream of the device, in the same order on all
    ranks. They and the operations with barriers share no memory, so they may be mixed.

    Args:
        offset: Byte offset of the slots in the buffer: a multiple of 16.
        world_size: Number of ranks.
        max_bytes: Room for what one rank sends to another, in bytes.
        device: Device of the buffer.

    Attributes:
        words: Number of operations so far, ticket counter and number of vectors that the last one
            stored; int32 [3] on `device`. Kernels alone write them.
    """

    def __init__(
        self, offset: int, world_size: int, max_bytes: int, *, device: torch.device
    ) -> None:
        self.offset = offset
        self.slot_bytes = lamport_slot_bytes(world_size, max_bytes)
        self.num_bytes = lamport_region_bytes(world_size, max_bytes)
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
