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
    "sent_bytes",
]

LAMPORT_BYTES = 128 * 1024
"""Room for what one rank sends to another in one operation, in bytes, unless told otherwise."""

_VECTOR = 16
# Numbers whose zero with a sign is equal to the one without. The others may have any bits.
_SENT_AS_THEY_ARE = {
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


def lamport_slot_bytes(world_size: int, max_bytes: int) -> int:
    """Size of a slot, in bytes: a segment of `max_bytes` bytes for each rank."""
    return world_size * max_bytes


def lamport_region_bytes(world_size: int, max_bytes: int) -> int:
    """Size of the memory that each rank needs, in bytes."""
    return LAMPORT_SLOTS * lamport_slot_bytes(world_size, max_bytes)


def is_spread(dtype: torch.dtype) -> bool:
    """True if elements are sent in twice their size, since they may have any bits."""
    return dtype not in _SENT_AS_THEY_ARE


def sent_bytes(num_bytes: int, dtype: torch.dtype) -> int:
    """Size of a shard as it is sent, in bytes."""
    return num_bytes * 2 if is_spread(dtype) else num_bytes


class LamportState:
    """Slots in the symmetric memory of this rank, and the words that count its operations. Local.

    Its operations run one after another on one stream of the device, in the same order on all
    ranks. They and the operations with barriers share no memory, so they may be mixed.

    Args:
        offset: Byte offset of the slots in the buffer: a multiple of 16.
        world_size: Number of ranks.
        max_bytes: Room for what one rank sends to another, in bytes: a multiple of 16.
        device: Device of the buffer.

    Attributes:
        words: Number of operations so far, ticket counter and number of vectors that the last one
            stored; int32 [3] on `device`. Kernels alone write them.
    """

    def __init__(
        self,
        offset: int,
        world_size: int,
        max_bytes: int = LAMPORT_BYTES,
        *,
        device: torch.device,
    ) -> None:
        self.offset, self.max_bytes = offset, max_bytes
        self.slot_bytes = lamport_slot_bytes(world_size, max_bytes)
        self.num_bytes = LAMPORT_SLOTS * self.slot_bytes
        self.words = torch.zeros(3, dtype=torch.int32, device=device)

    def clear(self, buffer: Tensor) -> None:
        """Mark all slots as empty, on the current stream.

        Before the first operation of any rank: all ranks clear, wait for their devices, and agree.

        Args:
            buffer: Buffer of this rank; uint8.
        """
        region = buffer[self.offset : self.offset + self.num_bytes].view(torch.int32)
        region.fill_(NOTHING_HERE - (1 << 32))

    def has_room_for(self, num_bytes: int, dtype: torch.dtype) -> bool:
        """True if what one rank sends to another fits: the same answer on all ranks.

        Args:
            num_bytes: Size of a shard of an all-gather, of the input of an all-reduce, or of a
                segment of a reduce-scatter, in bytes. Nothing and what is no multiple of 16 has no
                room.
            dtype: Type of its elements.
        """
        is_whole = num_bytes > 0 and num_bytes % _VECTOR == 0
        return is_whole and sent_bytes(num_bytes, dtype) <= self.max_bytes

    def arguments(self) -> dict[str, Any]:
        """What kernels are told of the slots, by name."""
        return {"state": self.words, "region": self.offset, "slot_bytes": self.slot_bytes}
