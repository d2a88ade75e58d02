"""On which device each process of a job computes, so that two share one only on purpose."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pcomm.core.errors import ConfigError
from pcomm.core.process import environment

__all__ = ["claim", "default_group_takes_cuda", "own_device"]


def default_group_takes_cuda() -> bool:
    """Whether collectives of the default group run on CUDA devices. Local.

    True for NCCL alone, for `"cpu:gloo,cuda:nccl"`, and for a group that was made with no backend
    on a machine with CUDA. Gloo takes tensors on CUDA devices too, by way of the host; a group of
    gloo alone counts as one for the CPU.
    """
    if not torch.cuda.is_available():
        return False
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backends = {device: backend for device, _, backend in pairs}
    return backends.get("cuda", "gloo") != "gloo"


def own_device(size: int, *, may_be_chosen: bool) -> torch.device:
    """The CUDA device of this process. Local.

    That to which the default group is bound; else the current one, if it is not the first; else
    the one with the number of the local rank that the launcher gave.

    Args:
        size: Number of processes of the job.
        may_be_chosen: True if the program has made the default group itself, and so may have
            chosen the first device for this process.

    Raises:
        ConfigError: The local rank is unknown or has no device of its own.
    """
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None and bound.type == "cuda":
        return torch.device(bound)
    current, num_devices = torch.cuda.current_device(), torch.cuda.device_count()
    # A launcher that shows each process its own device alone shows one, whatever the local rank.
    if current != 0 or num_devices == 1:
        return torch.device("cuda", current)
    local_rank = environment.local_rank()
    if local_rank is None:
        if may_be_chosen or size == 1:
            return torch.device("cuda", current)
        names = ", ".join(variable.name for variable in environment.LOCAL_RANKS)
        raise ConfigError(
            f"connect: a CUDA device for one of {size} processes",
            found=f"{num_devices} devices, and none of {names} set",
            why="Without its place on this machine each process would take the first device.",
            fix="Start the job with torchrun, srun or mpirun, set LOCAL_RANK, or pass device=.",
        )
    if local_rank >= num_devices:
        raise ConfigError(
            f"connect: a CUDA device for local rank {local_rank}",
            found=f"{num_devices} devices on this machine",
            why="Two processes would share a device, which NCCL refuses.",
            fix="Start at most one process for each device, or pass device= to share on purpose.",
        )
    return torch.device("cuda", local_rank)


def claim(store: dist.Store, device: torch.device, rank: int) -> None:
    """Note in the store that `rank` computes on `device`. Local.

    Raises:
        ConfigError: Another rank of the job already does.
    """
    physical = torch.cuda.get_device_properties(device).uuid
    owner = int(store.compare_set(f"pcomm/device/{physical}", "", str(rank)))
    if owner != rank:
        raise ConfigError(
            f"connect: {device} for rank {rank}",
            found=f"rank {owner} computes on the same device, {physical}",
            why="Two processes that share a device by mistake are slow, and NCCL refuses them.",
            fix="Call torch.cuda.set_device, or set LOCAL_RANK, before connecting; pass device= to "
            "share on purpose.",
        )
