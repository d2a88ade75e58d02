"""What the checks ask of a machine, as plain facts, so that a test can describe another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CudaFacts", "DeviceFacts", "HostFacts", "NcclFile", "Probe", "TorchFacts"]


@dataclass(frozen=True)
class HostFacts:
    """The process and its host; None where the system does not say.

    Args:
        python: Version and implementation, such as `"3.11.9 CPython"`.
        platform: System, release and processor.
        num_cores: Cores that this process may use.
        memory_bytes: Memory of the host.
        shared_memory_bytes: Size of `/dev/shm`.
        shared_memory_free_bytes: Free part of it.
        open_files: Soft limit of open files of this process.
    """

    python: str
    platform: str
    num_cores: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    open_files: int | None


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch.

    Args:
        version: Its version, with the local part.
        cuda: CUDA version that it was built for; None for a CPU build.
        is_distributed: True if `torch.distributed` was built.
        backends: Names gloo, nccl and mpi, each with True if torch was built with it.
        nccl: Version of the NCCL that it was built with, such as `"2.27.5"`.
        symmetric_memory: Allocators of symmetric memory that this build has.
        symmetric_memory_error: Error of its import; empty if it works.
    """

    version: str
    cuda: str | None
    is_distributed: bool
    backends: Mapping[str, bool]
    nccl: str | None
    symmetric_memory: tuple[str, ...]
    symmetric_memory_error: str


@dataclass(frozen=True)
class NcclFile:
    """One NCCL library on this machine.

    Args:
        path: Path of the library.
        origin: Source of the file, such as `"wheel"` or `"system"`.
        version: Version in its text, such as `"2.27.5+cuda12.9"`; None if there is none.
        is_loaded: True if the library is mapped into this process.
    """

    path: str
    origin: str
    version: str | None
    is_loaded: bool


@dataclass(frozen=True)
class DeviceFacts:
    """One CUDA device; None where neither the driver nor NVML says.

    Args:
        name: Product name.
        capability: Compute capability.
        memory_bytes: Device memory.
        has_multicast: True if the driver reports NVLink multicast for the device.
        is_mig: True if the device is split into instances.
        nvlinks: Active NVLinks.
        nvlinks_to_switch: Those of them that end at an NVSwitch.
        peers: Devices whose memory it can reach.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    has_multicast: bool | None
    is_mig: bool | None
    nvlinks: int | None
    nvlinks_to_switch: int | None
    peers: frozenset[int]


@dataclass(frozen=True)
class CudaFacts:
    """The CUDA driver and what it shows to this process.

    Args:
        driver: Version of the kernel driver, such as `"580.82.07"`.
        cuda: Newest CUDA version that the driver runs.
        devices: The visible devices, in CUDA's order.
        error: Answer of the driver when it was started; empty if it works.
        error_code: Its number; 0 if it works.
    """

    driver: str | None
    cuda: tuple[int, int] | None
    devices: tuple[DeviceFacts, ...]
    error: str = ""
    error_code: int = 0


class Probe(Protocol):
    """Where the checks look. None of these calls may hang; they may raise `ImportError`."""

    def host(self) -> HostFacts:
        """The process and its host."""

    def environment(self) -> Mapping[str, str]:
        """The environment variables."""

    def distributions(self) -> Mapping[str, str]:
        """Version of each installed distribution by its normalised name."""

    def module_version(self, name: str) -> str:
        """Import the module `name` and return its version."""

    def torch(self) -> TorchFacts:
        """The installed torch."""

    def nccl_files(self) -> tuple[NcclFile, ...]:
        """The NCCL libraries on this machine."""

    def cuda(self) -> CudaFacts | None:
        """The CUDA driver; None where there is none."""

    def all_reduce(self, timeout_s: float) -> float:
        """Add 1 and 2 over two gloo ranks on this machine and return the sum.

        Raises:
            Exception: The ranks did not start, failed, or took longer than `timeout_s`.
        """
