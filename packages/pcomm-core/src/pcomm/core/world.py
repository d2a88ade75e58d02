"""Joining the other processes of a job, however they were started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pcomm.core import env
from pcomm.core.agreement import fail_together
from pcomm.core.errors import ConfigError, PcommError

__all__ = ["World", "connect"]


@dataclass(frozen=True)
class World:
    """All processes of the job, as this one sees them.

    Args:
        rank: This process, from 0.
        size: Number of processes.
        device: Where this process computes.
        store: Key-value store shared by all; None when alone.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None

    def fail_together(self, topic: str, error: PcommError | None) -> None:
        """Raise on every rank if any rank has an error. Collective; see `agreement`."""
        fail_together(
            self.store, topic, error, self.rank, self.size, timeout_s=env.timeout_s()
        )


@contextmanager
def connect(
    *,
    backend: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[World]:
    """Join the job for the time of a `with` block. Collective.

    Under torchrun (`RANK` and `WORLD_SIZE` are set) the default process group is made and closed
    again; within `local_ranks` or a program that has made it, it is used as it is; otherwise the
    process is alone and nothing is initialised.

    Args:
        backend: `"gloo"` or `"nccl"`; by default NCCL where this process has a CUDA device.
        environ: Where the launcher's variables are; by default `os.environ`.

    Raises:
        ConfigError: The launcher's variables contradict each other.
    """
    variables = os.environ if environ is None else environ
    if dist.is_available() and dist.is_initialized():
        yield _joined()
        return
    if "WORLD_SIZE" not in variables or "RANK" not in variables:
        yield World(0, 1, _device(0), None)
        return
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(
            f"connect: RANK={rank}",
            found=f"WORLD_SIZE={size}",
            why="Ranks count from 0 to the world size less one.",
            fix="Start the job with torchrun, which sets both.",
        )
    if size == 1:
        yield World(0, 1, _device(0), None)
        return
    device = _device(_number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(600.0, env.timeout_s())),
    )
    try:
        yield _joined()
    finally:
        dist.destroy_process_group()


def _joined() -> World:
    store = dist.distributed_c10d._get_default_store()
    device = torch.device("cpu")
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return World(dist.get_rank(), dist.get_world_size(), device, store)


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(
            f"connect: {name}={variables[name]!r}",
            found="text that is not a whole number",
            why="The launcher numbers its processes.",
            fix="Start the job with torchrun, which sets it.",
        ) from None
