"""Joining the other processes of a job, however they were started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pcomm.core.control.control import Control
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.process import environment
from pcomm.core.process.devices import claim, default_group_takes_cuda, own_device
from pcomm.core.process.unconnected_default import is_connected

__all__ = ["World", "connect"]


@dataclass(frozen=True)
class World:
    """All processes of the job, as this one sees them.

    Args:
        rank: This process, from 0.
        size: Number of processes.
        device: Device of this process.
        store: Key-value store shared by all; None when alone.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None

    @property
    def control(self) -> Control:
        """The control plane of all processes of the job; generation 0. Local."""
        return Control(self.store, range(self.size), self.rank)

    def fail_together(
        self, topic: str, error: PcommError | None, *, timeout_s: float | None = None
    ) -> None:
        """Raise on every rank if any rank has an error. Collective; see `Control.agree`.

        Waits `timeout_s` seconds for the slowest rank, by default `PCOMM_TIMEOUT_S`.
        """
        self.control.fail_together(topic, error, timeout_s=timeout_s)


@contextmanager
def connect(
    *, backend: str | None = None, device: torch.device | str | None = None
) -> Iterator[World]:
    """Join the job for the time of a `with` block. Collective.

    Under torchrun, whose environment variables tell each process its place, the default process
    group is made and closed again; within `local_ranks` or a program that has made it, it is used
    as it is; otherwise the process is alone and nothing is initialised.

    `World.device` is a CUDA device where there is one and the default group has a backend for it
    (see `pcomm.core.process.devices`), and is then made the current one. Two processes do not
    get the same.

    Args:
        backend: `"gloo"` or `"nccl"`; by default NCCL where this process has a CUDA device.
        device: Device of this process, also if other processes use it; chosen if absent.

    Raises:
        ConfigError: The launcher's variables contradict each other, or some are missing; this
            process has no CUDA device of its own.
        PeerError: Another process has none.
    """
    if is_connected():
        yield _joined(device, may_be_chosen=True)
        return
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        yield World(0, 1, _device_alone(device), None)
        return
    _check_complete("RANK", "WORLD_SIZE")
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(
            f"connect: RANK={rank}",
            found=f"WORLD_SIZE={size}",
            why="Ranks count from 0 to the world size less one.",
            fix="Start the job with torchrun, which sets both.",
        )
    if size == 1:
        yield World(0, 1, _device_alone(device), None)
        return
    _check_complete("MASTER_ADDR", "MASTER_PORT")
    _init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(600.0, environment.timeout_s())),
    )
    try:
        world = _joined(device, may_be_chosen=False)
        yield world
        _wait_for_all_to_leave(world)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _init_process_group(backend: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Torch's function of that name, with an error of ours where it cannot use the address."""
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistNetworkError as error:
        is_taken = "EADDRINUSE" in str(error)
        raise ConfigError(
            f"connect: MASTER_ADDR={address}, MASTER_PORT={port}",
            found="the port is in use" if is_taken else str(error).splitlines()[0],
            why="Rank 0 listens there, and the other ranks find it by this address.",
            fix="End the job that has it, or set MASTER_PORT to a free port on all ranks; torchrun "
            "finds one by itself with --standalone."
            if is_taken
            else "Set both to an address of rank 0 that all ranks reach, and start all ranks.",
        ) from error


def _wait_for_all_to_leave(world: World) -> None:
    """Keep rank 0 until the others are done: without a launcher's, the store lives in it."""
    assert world.store is not None
    if world.store.add("pcomm/left", 1) == world.size:
        world.store.set("pcomm/all left", "")
    if world.rank == 0:
        # A rank that has failed never leaves; it tells so itself.
        with suppress(RuntimeError):
            world.store.wait(["pcomm/all left"], timedelta(seconds=environment.timeout_s()))


def _joined(device: torch.device | str | None, *, may_be_chosen: bool) -> World:
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    if device is not None:
        return World(rank, size, _current(torch.device(device)), store)
    world = World(rank, size, torch.device("cpu"), store)
    if not default_group_takes_cuda():
        return world
    error: PcommError | None = None
    try:
        own = own_device(size, may_be_chosen=may_be_chosen)
        claim(store, own, rank)
    except PcommError as problem:
        error = problem
    world.fail_together("connect: devices", error)
    own = _current(own)
    if not may_be_chosen:
        _connect_on(own)
    return replace(world, device=own)


def _connect_on(device: torch.device) -> None:
    """Have NCCL connect the default group now, as `init_process_group(device_id=...)` does.

    A device that two ranks share is found before, since NCCL does not say which ranks these are.
    """
    default = dist.distributed_c10d._get_default_group()
    backend = default._get_backend(device)
    # Of all backends NCCL alone does, and it alone connects in its first operation otherwise.
    if backend.supports_splitting:
        default.bound_device_id = device
        backend.eager_connect_single_device(device)


def _device_alone(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return _current(torch.device(device))
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _current(device: torch.device) -> torch.device:
    """`device`, made the current one if it is a CUDA device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _check_complete(*names: str) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        known = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = ", ".join(f"{n}={os.environ[n]}" for n in known if n in os.environ)
        raise ConfigError(
            f"connect: {' and '.join(missing)} not set",
            found=values,
            why="A process of a job needs its place, their number, and the address of rank 0.",
            fix="Start the job with torchrun, which sets all of them, or unset them to run alone.",
        )


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"connect: {name}={os.environ[name]!r}",
            found="text that is not a whole number",
            why="The launcher numbers its processes.",
            fix="Start the job with torchrun, which sets it.",
        ) from None
