"""Ranks of one process: all buffers and signal pads in one allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core.memory.symmetric.segments import Segments

__all__ = ["VirtualMemory"]


class VirtualMemory:
    """The `Backing` of ranks that exist in one process only.

    Args:
        segments: Sizes.
        device: Device of the allocation.
        arena: Allocation that another rank has made, by `new_arena`; None to make one.
    """

    name = "virtual"

    def __init__(
        self, segments: Segments, device: torch.device, arena: torch.Tensor | None = None
    ) -> None:
        self.device, self._segments, self._arena = device, segments, arena
        self.buffer_ptrs: tuple[int, ...] = ()
        self.signal_pad_ptrs: tuple[int, ...] = ()
        self.multicast_ptr: int | None = None

    @staticmethod
    def new_arena(segments: Segments, device: torch.device) -> torch.Tensor:
        """Zeros for all ranks: uint8, from an aligned address on."""
        slack = Segments.aligned(1)
        arena = torch.zeros(segments.total_bytes + slack, dtype=torch.uint8, device=device)
        begin = Segments.aligned(arena.data_ptr()) - arena.data_ptr()
        return arena[begin : begin + segments.total_bytes]

    def allocate(self) -> str:
        """Allocate, unless there is an allocation already."""
        if self._arena is None:
            self._arena = self.new_arena(self._segments, self.device)
        return ""

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Compute the addresses."""
        begin = self._memory.data_ptr()
        self.buffer_ptrs = self._segments.buffer_ptrs(begin)
        self.signal_pad_ptrs = self._segments.pad_ptrs(begin)

    def finish(self) -> None:
        """There is nothing to give back."""

    def buffer(self, rank: int) -> torch.Tensor:
        """A view of the allocation."""
        begin = self._segments.buffer_offset(rank)
        return self._memory[begin : begin + self._segments.num_bytes]

    def signal_pad(self, rank: int) -> torch.Tensor:
        """A view of the allocation."""
        begin = self._segments.pad_offset(rank)
        return self._memory[begin : begin + self._segments.signal_bytes].view(torch.int32)

    def quiesce(self) -> None:
        """Wait for all streams of a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Drop the allocation; the last rank or tensor frees it."""
        self._arena = None

    @property
    def _memory(self) -> torch.Tensor:
        assert self._arena is not None
        return self._arena
