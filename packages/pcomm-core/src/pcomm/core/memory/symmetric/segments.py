"""Where the buffers and signal pads of all ranks lie in one range of memory. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Segments"]

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Segments:
    """A segment for each rank, one after another: its buffer, then its signal pad.

    Both begin at multiples of 4096 bytes from the begin of the range.

    Args:
        size: Number of ranks.
        num_bytes: Size of each buffer, in bytes.
        signal_bytes: Size of each signal pad, in bytes.
    """

    size: int
    num_bytes: int
    signal_bytes: int

    @property
    def segment_bytes(self) -> int:
        """Distance from the segment of one rank to that of the next, in bytes."""
        return _whole_pages(self.num_bytes) + _whole_pages(self.signal_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the range, in bytes."""
        return self.size * self.segment_bytes

    def buffer_offset(self, rank: int) -> int:
        """First byte of the buffer of `rank`."""
        return rank * self.segment_bytes

    def pad_offset(self, rank: int) -> int:
        """First byte of the signal pad of `rank`."""
        return self.buffer_offset(rank) + _whole_pages(self.num_bytes)

    def buffer_ptrs(self, begin: int) -> tuple[int, ...]:
        """Addresses of all buffers in a range that begins at address `begin`."""
        return tuple(begin + self.buffer_offset(rank) for rank in range(self.size))

    def pad_ptrs(self, begin: int) -> tuple[int, ...]:
        """Addresses of all signal pads in a range that begins at address `begin`."""
        return tuple(begin + self.pad_offset(rank) for rank in range(self.size))

    @staticmethod
    def aligned(address: int) -> int:
        """The first address at or after `address` at which a range may begin."""
        return _whole_pages(address)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
