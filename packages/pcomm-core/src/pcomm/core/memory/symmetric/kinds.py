"""Which kind of symmetric memory a group gets, and whether what is asked for can be had."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.groups.group import Group
from pcomm.core.memory.symmetric.backing import Backing
from pcomm.core.memory.symmetric.segments import Segments
from pcomm.core.memory.symmetric.shm import SharedFileMemory
from pcomm.core.memory.symmetric.torch_memory import TorchMemory
from pcomm.core.memory.symmetric.virtual import VirtualMemory

__all__ = ["check_sizes", "new_backing"]

_KINDS = ("auto", "shm", "torch", "virtual")


def check_sizes(segments: Segments) -> None:
    """Raise `ConfigError` for sizes that no memory has. Local."""
    num_bytes, signal_bytes = segments.num_bytes, segments.signal_bytes
    if segments.size > 0 and num_bytes > 0 and signal_bytes > 0 and signal_bytes % 4 == 0:
        return
    raise ConfigError(
        f"SymmetricMemory of {segments.size} ranks",
        found=f"num_bytes={num_bytes}, signal_bytes={signal_bytes}",
        why="A buffer has at least one byte, and a signal pad is a number of int32, at least one.",
        fix="Give a num_bytes above 0 and a signal_bytes above 0 that is a multiple of 4.",
    )


def new_backing(
    group: Group, segments: Segments, kind: str, device: torch.device | str | None
) -> Backing:
    """Symmetric memory of a kind that is not allocated yet. Local.

    Args:
        group: Ranks that share the memory.
        segments: Sizes.
        kind: `"shm"`, `"torch"`, `"virtual"`, or `"auto"`: by the device, and `"virtual"` for one
            rank without a communicator.
        device: Device of the buffers; None for the current GPU on NCCL, else the CPU.

    Raises:
        ConfigError: The kind is not known, or does not go with the group or the device.
    """
    process_group = group.process_group
    place = _device_of(process_group) if device is None else torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if kind not in _KINDS:
        raise ConfigError(
            f"SymmetricMemory.open: backend {kind!r}",
            found=f"the backends {_KINDS}",
            why="A backend decides whose memory can be mapped.",
            fix=near_misses(kind, _KINDS),
        )
    if kind == "auto":
        kind = "torch" if place.type == "cuda" else "shm"
        kind = "virtual" if process_group is None and group.size == 1 else kind
    if kind == "shm" and place.type == "cpu":
        return SharedFileMemory(group.rank, segments)
    if kind == "virtual" and group.size == 1:
        return VirtualMemory(segments, place)
    if kind == "torch" and place.type == "cuda" and process_group is not None:
        return TorchMemory(process_group, group.rank, segments, place)
    raise ConfigError(
        f"SymmetricMemory.open: backend {kind!r}",
        found=f"group {group.key} of {group.size} ranks, device {place}"
        + ("" if process_group is not None else ", without a communicator"),
        why="shm is for CPUs, torch for GPUs and a communicator, virtual for one rank.",
        fix="Leave backend='auto'; SymmetricMemory.virtual makes several ranks in one process.",
    )


def _device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    on_gpus = process_group is not None and "nccl" in dist.get_backend(process_group)
    return torch.device("cuda" if on_gpus else "cpu")
