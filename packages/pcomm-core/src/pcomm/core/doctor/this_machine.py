"""The facts of this machine: what is installed, its devices, and its driver by ctypes."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import mmap
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pcomm.core.doctor.report import CudaFacts, DeviceFacts, HostFacts, NcclFile, TorchFacts

__all__ = ["ThisMachine", "cuda_facts", "limits_of_group"]


_NCCL_NAME = re.compile(r"libnccl\.so(\.[0-9.]+)?$")
# NCCL prints this text at start-up, so every release carries it. Reading it loads no library.
_NCCL_TEXT = re.compile(rb"NCCL version (\d+\.\d+\.\d+[0-9A-Za-z.+-]*)\0")


# By the questions of torch to the processor, which each version may have or not.
_INSTRUCTIONS = {
    "AVX2": "_is_avx2_supported",
    "AVX-512": "_is_avx512_supported",
    "AVX-512 BF16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
}


class ThisMachine:
    """Answers from this process, its host and its environment; see `MachineProbe`."""

    def host(self) -> HostFacts:
        """The process and its host."""
        shared, free = _shared_memory()
        core_limit, memory_limit = limits_of_group()
        return HostFacts(
            python=f"{platform.python_version()} {platform.python_implementation()}",
            platform=platform.platform(),
            num_cores=_num_cores(),
            memory_bytes=_memory_bytes(),
            shared_memory_bytes=shared,
            shared_memory_free_bytes=free,
            open_files=_open_files(),
            core_limit=core_limit,
            memory_limit_bytes=memory_limit,
            name=socket.gethostname(),
            addresses=_addresses(socket.gethostname()),
        )

    def environment(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def distributions(self) -> Mapping[str, str]:
        """Version of each installed distribution by its normalised name."""
        return {
            re.sub(r"[-_.]+", "-", found.name).lower(): found.version
            for found in importlib.metadata.distributions()
            # A folder left over from an interrupted installation has no name.
            if found.metadata["Name"]
        }

    def module_version(self, name: str) -> str:
        """Import the module `name` and return its version."""
        return str(getattr(importlib.import_module(name), "__version__", "version not known"))

    def torch(self) -> TorchFacts:
        """The installed torch."""
        import torch
        import torch.distributed as dist

        is_distributed = dist.is_available()
        backends = {}
        if is_distributed:
            backends = {
                "gloo": dist.is_gloo_available(),
                "nccl": dist.is_nccl_available(),
                "mpi": dist.is_mpi_available(),
            }
        nccl = None
        if backends.get("nccl") and torch.version.cuda is not None:
            # Neither annotated in torch nor always of the same length.
            nccl_version_parts: Any = torch.cuda.nccl.version
            nccl = ".".join(map(str, nccl_version_parts()[:3]))
        allocators, error = _symmetric_memory()
        return TorchFacts(
            version=torch.__version__,
            cuda=torch.version.cuda,
            is_distributed=is_distributed,
            backends=backends,
            nccl=nccl,
            symmetric_memory=allocators,
            symmetric_memory_error=error,
            instructions=tuple(
                name
                for name, asked in _INSTRUCTIONS.items()
                if getattr(torch.cpu, asked, lambda: False)()
            ),
        )

    def nccl_files(self) -> tuple[NcclFile, ...]:
        """The NCCL libraries on this machine, each file once whatever its links are called."""
        loaded = {path for path in _mapped_files() if _NCCL_NAME.search(path.name)}
        found: dict[Path, str] = {}
        for origin, path in (*_nccl_places(), *(("loaded", path) for path in sorted(loaded))):
            found.setdefault(path, origin)
        return tuple(
            NcclFile(str(path), origin, nccl_version(path), path in loaded)
            for path, origin in found.items()
        )

    def cuda(self) -> CudaFacts | None:
        """The CUDA driver; None where there is none."""
        return cuda_facts()

    def all_reduce(self, timeout_s: float) -> float:
        """Add 1 and 2 over two gloo ranks on this machine and return the sum."""
        from pcomm.core.process.local_ranks import RankError, run_local

        try:
            sums = run_local(_add_ranks, 2, timeout_s=timeout_s)
        except RankError as problem:
            # What went wrong in the rank tells more than where in this program it was noticed.
            raise (problem.error or problem) from None
        return float(sums[0])


_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_MULTICAST_SUPPORTED: Final = 132
_MIG_ENABLED: Final = 1
_LINK_ACTIVE: Final = 1
_REMOTE_IS_SWITCH: Final = 2
# More than any GPU has; NVML refuses the numbers above the last link.
_MAX_NVLINKS: Final = 64
_TEXT_BYTES: Final = 96


def cuda_facts(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> CudaFacts | None:
    """What the driver and NVML say; None where there is no driver.

    Args:
        load: Opens a shared library by name and raises `OSError` if there is none.
    """
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return None
    nvml = _open_nvml(load)
    try:
        version = _text(nvml, "nvmlSystemGetDriverVersion") if nvml is not None else None
        code = driver.cuInit(0)
        if code != 0:
            return CudaFacts(version, None, (), _error_text(driver, code), code)
        number = _int(driver, "cuDriverGetVersion")
        cuda = None if number is None else (number // 1000, number % 1000 // 10)
        handles = [
            _int(driver, "cuDeviceGet", index) or 0
            for index in range(_int(driver, "cuDeviceGetCount") or 0)
        ]
        devices = tuple(_device(driver, nvml, handle, handles) for handle in handles)
        return CudaFacts(version, cuda, devices)
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _open_nvml(load: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL | None:
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if _succeeds(nvml, "nvmlInit_v2") else None


def _device(
    driver: ctypes.CDLL, nvml: ctypes.CDLL | None, handle: int, handles: list[int]
) -> DeviceFacts:
    memory = ctypes.c_size_t()
    _succeeds(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    multicast = _int(driver, "cuDeviceGetAttribute", _MULTICAST_SUPPORTED, handle)
    managed = _managed_device(nvml, _text(driver, "cuDeviceGetPCIBusId", handle) or "")
    is_mig, nvlinks, to_switch = None, None, None
    if nvml is not None and managed is not None:
        is_mig = _is_mig(nvml, managed)
        nvlinks, to_switch = _nvlinks(nvml, managed)
    return DeviceFacts(
        name=_text(driver, "cuDeviceGetName", handle) or "unknown",
        capability=(
            _int(driver, "cuDeviceGetAttribute", _CAPABILITY_MAJOR, handle) or 0,
            _int(driver, "cuDeviceGetAttribute", _CAPABILITY_MINOR, handle) or 0,
        ),
        memory_bytes=memory.value,
        has_multicast=None if multicast is None else bool(multicast),
        is_mig=is_mig,
        nvlinks=nvlinks,
        nvlinks_to_switch=to_switch,
        peers=frozenset(
            index
            for index, other in enumerate(handles)
            if other != handle and _int(driver, "cuDeviceCanAccessPeer", handle, other)
        ),
    )


def _managed_device(nvml: ctypes.CDLL | None, pci_address: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    address = ctypes.c_char_p(pci_address.encode())
    find = "nvmlDeviceGetHandleByPciBusId_v2"
    if nvml is None or not _succeeds(nvml, find, address, ctypes.byref(device)):
        return None
    return device


def _is_mig(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> bool:
    # A GPU that cannot be split answers "not supported", which is a no.
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    arguments = (device, ctypes.byref(mode), ctypes.byref(pending))
    return _succeeds(nvml, "nvmlDeviceGetMigMode", *arguments) and mode.value == _MIG_ENABLED


def _nvlinks(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, int]:
    active = to_switch = 0
    for link in range(_MAX_NVLINKS):
        state, remote = ctypes.c_uint(), ctypes.c_uint()
        if not _succeeds(nvml, "nvmlDeviceGetNvLinkState", device, link, ctypes.byref(state)):
            continue
        if state.value != _LINK_ACTIVE:
            continue
        active += 1
        question = "nvmlDeviceGetNvLinkRemoteDeviceType"
        if _succeeds(nvml, question, device, link, ctypes.byref(remote)):
            to_switch += remote.value == _REMOTE_IS_SWITCH
    return active, to_switch


def _error_text(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if _succeeds(driver, "cuGetErrorString", code, ctypes.byref(text)) and text.value:
        return text.value.decode(errors="replace")
    return "unknown error"


def _int(library: ctypes.CDLL, function: str, *arguments: object) -> int | None:
    """The int that `function` writes to its first argument; None if it answers with an error."""
    value = ctypes.c_int()
    return value.value if _succeeds(library, function, ctypes.byref(value), *arguments) else None


def _text(library: ctypes.CDLL, function: str, *arguments: object) -> str | None:
    """The text that `function` writes to its first two arguments, a buffer and its size."""
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    if not _succeeds(library, function, buffer, _TEXT_BYTES, *arguments):
        return None
    return buffer.value.decode(errors="replace")


def _succeeds(library: ctypes.CDLL, function: str, *arguments: object) -> bool:
    # An old driver lacks some functions; asking it then is like an answer "not supported".
    call = getattr(library, function, None)
    return call is not None and call(*arguments) == 0


def nccl_version(path: Path) -> str | None:
    """What the NCCL library at `path` says of its version, without loading it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = _NCCL_TEXT.search(content)
        return None if match is None else match[1].decode()


def _add_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()


def _symmetric_memory() -> tuple[tuple[str, ...], str]:
    try:
        import torch.distributed._symmetric_memory as symmetric
    except (ImportError, AttributeError, RuntimeError) as error:
        return (), f"{type(error).__name__}: {error}"
    has_nvshmem = getattr(symmetric, "is_nvshmem_available", lambda: False)()
    return ("CUDA", "NVSHMEM") if has_nvshmem else ("CUDA",), ""


def _nccl_places() -> Iterator[tuple[str, Path]]:
    """Each NCCL library that can be found, with what it belongs to; links resolved."""
    for entry in map(Path, dict.fromkeys(sys.path)):
        yield from (("wheel", path) for path in _nccl_in(entry / "nvidia/nccl/lib"))
        yield from (("torch", path) for path in _nccl_in(entry / "torch/lib"))
    for name in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield from (("LD_LIBRARY_PATH", path) for path in _nccl_in(Path(name)))
    for name in re.split(r"[: ]", os.environ.get("LD_PRELOAD", "")):
        if _NCCL_NAME.search(name) and Path(name).is_file():
            yield "LD_PRELOAD", Path(name).resolve()
    usual = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64")
    for folder in (*map(Path, usual), *sorted(Path("/usr/lib").glob("*-linux-gnu"))):
        yield from (("system", path) for path in _nccl_in(folder))


def _nccl_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.glob("libnccl.so*")):
            if _NCCL_NAME.search(path.name) and path.is_file():
                yield path.resolve()


def _mapped_files() -> Iterator[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith("/"):
            yield Path(path[0])


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def limits_of_group(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None]:
    """Cores and bytes that the control groups of this process leave it; None for all. Local.

    A container or a batch system sets them. Only those of version 2 are read.

    Args:
        root: Folder of all groups.
        own: File that says which one is that of this process.
    """
    cores: list[float] = []
    sizes: list[int] = []
    try:
        text = own.read_text()
    except OSError:
        return None, None
    path = next((line[3:] for line in text.splitlines() if line.startswith("0::")), None)
    if path is None:
        return None, None
    here = root / path.lstrip("/")
    # Each group has at most what the one around it has.
    for group in (here, *here.parents):
        if not group.is_relative_to(root):
            break
        # "max" is no number, and the outermost group has no such files.
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            sizes.append(int((group / "memory.max").read_text()))
    return min(cores, default=None), min(sizes, default=None)


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(place[4][0]) for place in found))


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        state = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return None, None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
