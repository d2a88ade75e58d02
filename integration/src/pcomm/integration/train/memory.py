"""How much memory this process uses."""

from __future__ import annotations

import os

import torch

__all__ = ["memory_mib"]


def memory_mib(device: torch.device) -> float:
    """MiB allocated on a CUDA device, else resident in this process now. Local."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        # Not Linux: the most it ever had is the nearest thing that Python knows everywhere.
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
