"""How much memory a process uses: for the rows of a run."""

from __future__ import annotations

import ctypes
import resource

import torch

__all__ = ["memory_mib"]

# The fields of glibc's `struct mallinfo2`, of which the 5th and the 8th are asked for.
_FIELDS = 10
_MAPPED, _IN_USE = 4, 7


class _MallInfo(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_size_t * _FIELDS)]


def memory_mib(device: torch.device) -> float:
    """MiB allocated on a CUDA device, else by this process, which may keep more of them. Local.

    What an allocator keeps for later is not counted: it grows with what fragments it, and would
    look like a leak.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        # No glibc of 2.33 or later: the most that it ever had is known everywhere.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    mallinfo.restype = _MallInfo
    numbers = mallinfo().numbers
    return float(numbers[_MAPPED] + numbers[_IN_USE]) / 2**20
