"""Buffers that are used one after another within a step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BufferPool"]


class BufferPool:
    """Hands out flat buffers, and takes them back for the next one of the same size.

    Units of equal size then share a few gradient buffers, whose memory is mapped once. Nothing is
    kept between steps.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer with any contents."""
        free = self._free.get((length, dtype))
        return free.pop() if free else torch.empty(length, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that is not read any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Give all memory back."""
        self._free.clear()
