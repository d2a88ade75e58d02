"""Where the parts of a workspace lie in the symmetric memory of a rank. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_BLOCKS", "Regions"]

MAX_BLOCKS = 32
"""Most thread blocks of a launch: each has a row of signals."""

_PAGE = 4096


@dataclass(frozen=True)
class Regions:
    """Byte offsets in the buffer of each rank: signals, slots, then the low-latency region.

    Args:
        world_size: Number of ranks.
        slot_bytes: Size of the largest tensor that an operation works on, in bytes.
        num_slots: Number of slots.
        low_latency_bytes: Size of the region of the barrier-free operations, in bytes.
    """

    world_size: int
    slot_bytes: int
    num_slots: int
    low_latency_bytes: int = 0

    @property
    def signal_bytes(self) -> int:
        """Size of the signals: a word of 4 bytes for each block and rank."""
        return _whole_pages(MAX_BLOCKS * self.world_size * 4)

    def slot(self, place: int) -> int:
        """Offset of a slot."""
        return self.signal_bytes + place * _whole_pages(self.slot_bytes)

    @property
    def low_latency(self) -> int:
        """Offset of the low-latency region."""
        return self.slot(self.num_slots)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.low_latency + _whole_pages(self.low_latency_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
