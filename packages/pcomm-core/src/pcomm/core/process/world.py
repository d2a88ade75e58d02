"""Joining the other processes of a job, however they were started, each on a device of its own."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from pcomm.core import environment
from pcomm.core.control.control import Control
from pcomm.core.control.without_control import is_connected
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.abandoning import abort_communicator

__all__ = [
    "ANYWHERE",
    "World",
    "connect",
    "ipv4_of",
    "reachable_interface",
    "unconnected_control",
]


_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
# Assigned to no host (RFC 5737), and nothing is sent to it: the default route goes there.
ANYWHERE: Final = "192.0.2.1"
# Linux's request for the address of an interface.
_SIOCGIFADDR: Final = 0x8915
# Key under which a rank that cannot connect tells the others, and how often these look.
_FAILED: Final = "pcomm/could not connect"
_LISTENING_S: Final = 0.2


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
    (see `pcomm.core.process.world`), and is then made the current one. Two processes do not
    get the same.

    Between hosts gloo needs an address that the others reach. If this host's name resolves to
    loopback and `GLOO_SOCKET_IFNAME` is not set, it is set for the block to the interface on the
    route to `MASTER_ADDR`. Signals are handled while this process connects.

    An error in the block aborts a default group of NCCL before it is ended, which would wait for
    the operations of ranks that are gone otherwise; that has not run on hardware.

    Args:
        backend: `"gloo"` or `"nccl"`; by default NCCL where this process has a CUDA device.
        device: Device of this process, also if other processes use it; chosen if absent.

    Raises:
        ConfigError: The launcher's variables contradict each other, or some are missing; this
            process has no CUDA device of its own; a rank cannot connect to another one, which
            all ranks raise.
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
    with reachable_interface(*_other_hosts()):
        try:
            _init_process_group(
                backend or ("nccl" if torch.cuda.is_available() else "gloo"),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=max(600.0, environment.timeout_s())),
            )
            world = _joined(device, may_be_chosen=False)
            yield world
            _wait_for_all_to_leave(world)
        except BaseException:
            # Torch's end of NCCL waits for operations in flight, whose ranks may be gone.
            if dist.is_initialized():
                abort_communicator(dist.distributed_c10d._get_default_group())
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _joined(device: torch.device | str | None, *, may_be_chosen: bool) -> World:
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    if device is not None:
        return World(rank, size, _current(torch.device(device)), store)
    world = World(rank, size, torch.device("cpu"), store)
    if not _default_group_takes_cuda():
        return world
    error: PcommError | None = None
    try:
        own = _own_device(size, may_be_chosen=may_be_chosen)
        _claim(store, own, rank)
    except PcommError as problem:
        error = problem
    world.fail_together("connect: devices", error)
    own = _current(own)
    if not may_be_chosen:
        _connect_on(own)
    return replace(world, device=own)


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


def _wait_for_all_to_leave(world: World) -> None:
    """Keep rank 0 until the others are done: without a launcher's, the store lives in it."""
    assert world.store is not None
    if world.store.add("pcomm/left", 1) == world.size:
        world.store.set("pcomm/all left", "")
    if world.rank == 0:
        # A rank that has failed never leaves; it tells so itself.
        with suppress(RuntimeError):
            world.store.wait(["pcomm/all left"], timedelta(seconds=environment.timeout_s()))


def unconnected_control() -> Control:
    """A control of the processes that a launcher has started, before they connect. Local.

    Nothing waits for all of them but its agreements, whose errors name those that do not come. Its
    store is that of `connect`, under other keys, and lives as long as a process of rank 0 has it.

    Raises:
        RuntimeError: Torch's, if rank 0 does not answer within `PCOMM_TIMEOUT_S`.
    """
    _check_complete("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    # The launcher's own process keeps the store then.
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        _number("MASTER_PORT"),
        is_master=rank == 0 and not is_kept,
        timeout=timedelta(seconds=environment.timeout_s()),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # Each start of a job by torchrun has keys of its own in the launcher's store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Control(dist.PrefixStore(f"pcomm/before connecting/{attempt}", store), range(size), rank)


def _init_process_group(backend: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Torch's function of that name, whose failure on one rank is an error of ours on all of them.

    Torch waits in C++, where neither a signal nor the failure of another rank is noticed. So a
    thread connects, and this one listens. After a failure that thread stays until the time is up.
    """
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    asked = f"connect: MASTER_ADDR={address}, MASTER_PORT={port}"
    stores: list[dist.Store] = []
    problems: list[Exception] = []
    has_ended = threading.Event()

    def join() -> None:
        try:
            found, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
            found.set_timeout(timeout)
            # As torch does, so that others who use this store do not meet our keys.
            store: Any = dist.PrefixStore("default_pg", found)
            # A connection of its own: that of `store` is taken while gloo waits in it.
            stores.append(store.clone())
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        except Exception as problem:  # raised by the thread that listens
            problems.append(problem)
        has_ended.set()

    threading.Thread(target=join, name="pcomm connecting", daemon=True).start()
    told = None
    try:
        while not has_ended.wait(_LISTENING_S):
            if stores and stores[0].check([_FAILED]):
                told = stores[0].get(_FAILED).decode()
                break
    except RuntimeError as problem:
        # The store lives in rank 0, unless a launcher keeps it.
        told = f"rank 0 is gone: {_first_line(problem)}"
    if told is None and not problems:
        return
    if told is None:
        told = f"rank {rank} on {socket.gethostname()}: {_first_line(problems[0])}"
        with suppress(RuntimeError):
            for store in stores:
                store.set(_FAILED, told)
    cause = problems[0] if problems else None
    if cause is None or stores:
        interface = os.environ.get(_INTERFACE)
        raise ConfigError(
            asked,
            found=told,
            why="Each rank connects to every other one, by the interface "
            + ("that this host's name resolves to." if interface is None else f"{interface!r}."),
            fix=f"Set {_INTERFACE} on each host to the interface that joins the hosts, as `ip "
            "address` lists it, open their ports to each other, and start all ranks.",
        ) from cause
    if not isinstance(cause, dist.DistNetworkError):
        raise cause
    is_taken = "EADDRINUSE" in str(cause)
    raise ConfigError(
        asked,
        found="the port is in use" if is_taken else _first_line(cause),
        why="Rank 0 listens there, and the other ranks find it by this address.",
        fix="End the job that has it, or set MASTER_PORT to a free port on all ranks; torchrun "
        "finds one by itself with --standalone."
        if is_taken
        else "Set both to an address of rank 0 that all ranks reach, and start all ranks.",
    ) from cause


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def _other_hosts() -> tuple[str, ...]:
    """Addresses on the way to other hosts: rank 0's, and one beyond; none of ranks of one host."""
    num_local = os.environ.get("LOCAL_WORLD_SIZE")
    if num_local == os.environ["WORLD_SIZE"]:
        return ()
    return (os.environ["MASTER_ADDR"], *([ANYWHERE] if num_local is not None else []))


@contextmanager
def reachable_interface(*hosts: str) -> Iterator[None]:
    """Have gloo's groups of the block bind an address that other hosts reach. Local.

    Gloo binds the first address of this host's name. Where that is loopback, as in Debian's
    /etc/hosts, the block takes the interface on the route to another host. A variable that the user
    has set stays.

    Args:
        hosts: Names or addresses. The first that is not loopback here counts; none changes nothing.
    """
    if _INTERFACE in os.environ or not hosts or not _binds_loopback():
        yield
        return
    found = next(filter(None, map(_interface_to, hosts)), None)
    if found is None:
        yield
        return
    os.environ[_INTERFACE] = found
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def _binds_loopback() -> bool:
    """Whether the address that gloo binds by itself is loopback. Local."""
    with suppress(OSError):
        for family, kind, _, _, place in _addresses_of(socket.gethostname()):
            with suppress(OSError), socket.socket(family, kind) as own:
                own.bind(place)
                return _is_loopback(place)
    # What it takes where the name has no address of this host.
    return True


def _interface_to(host: str) -> str | None:
    """Name of the interface from which packets go to another host; None if it is this one."""
    with suppress(OSError):
        for family, _, _, _, place in _addresses_of(host):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
                # Finds the route; a datagram socket sends nothing until it is told to.
                own.connect((place[0], 9, *place[2:]))
                if not _is_loopback(own.getsockname()):
                    return _interface_with(str(own.getsockname()[0]))
    return None


def _interface_with(address: str) -> str | None:
    """Name of the interface that has an address; of IPv4 the first address of each counts."""
    if ":" in address:
        digits = ip_address(address.partition("%")[0]).exploded.replace(":", "")
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                if line.startswith(digits):
                    return line.split()[-1]
        return None
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if ipv4_of(name) == address:
                return name
    return None


def ipv4_of(interface: str) -> str:
    """The first IPv4 address of an interface of this host. Local.

    Raises:
        OSError: It has none, or there is no such interface.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(own, _SIOCGIFADDR, asked)[20:24])


def _addresses_of(host: str) -> list[tuple[Any, Any, int, str, Any]]:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)


def _is_loopback(place: tuple[Any, ...]) -> bool:
    return ip_address(str(place[0]).partition("%")[0]).is_loopback


def _default_group_takes_cuda() -> bool:
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


def _own_device(size: int, *, may_be_chosen: bool) -> torch.device:
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


def _claim(store: dist.Store, device: torch.device, rank: int) -> None:
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
