"""What the host tells a device, in one copy from pinned memory that the host does not wait for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["packed_int32", "unpacked_int32", "upload"]


# Triton compiles a kernel once more for a tensor that begins elsewhere.
_ALIGNMENT = 16


def upload(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors of the host on a device, by one copy. Local.

    The copy is put behind what the current stream of the device has to do. It reads pinned memory
    of its own, which torch's allocator gives to nobody before the device has read it. So the parts
    may change at once, and the host does not wait.

    Args:
        parts: Tensors on the host of one dtype and one dimension; some may be empty.
        device: Device that gets them.

    Returns:
        Views of one tensor of the device, in the same order, aligned to 16 bytes; the parts
        themselves for a CPU.
    """
    if device.type == "cpu" or not parts:
        return parts
    dtype = parts[0].dtype
    multiple = _ALIGNMENT // dtype.itemsize
    sizes = [-(-len(part) // multiple) * multiple for part in parts]
    pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
    for place, part in zip(pinned.split_with_sizes(sizes), parts, strict=True):
        place[: len(part)].copy_(part)
    sent = pinned.to(device, non_blocking=True).split_with_sizes(sizes)
    return [place[: len(part)] for place, part in zip(sent, parts, strict=True)]


def packed_int32(numbers: Sequence[int]) -> array[int]:
    """Integers of 32 bits, two in each of 64 bits, for a part of such. Local."""
    halves = array("i", numbers)
    halves.extend([0] * (len(halves) % 2))
    return array("q", halves.tobytes())


def unpacked_int32(part: Tensor, count: int) -> Tensor:
    """int32 `[count]`, a view of what `packed_int32` made. Local.

    Args:
        part: int64, at least the integers that were made.
        count: Number of integers of 32 bits.
    """
    return part.view(torch.int32)[:count]
