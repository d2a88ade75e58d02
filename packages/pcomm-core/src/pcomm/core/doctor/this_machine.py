"""The probe that looks at the machine it runs on."""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pcomm.core.doctor.nvidia import cuda_facts
from pcomm.core.doctor.probe import CudaFacts, HostFacts, NcclFile, TorchFacts

__all__ = ["ThisMachine"]

_NCCL_NAME = re.compile(r"libnccl\.so(\.[0-9.]+)?$")
# NCCL prints this text at start-up, so every release carries it. Reading it loads no library.
_NCCL_TEXT = re.compile(rb"NCCL version (\d+\.\d+\.\d+[0-9A-Za-z.+-]*)\0")


class ThisMachine:
    """Answers from this process, its host and its environment; see `Probe`."""

    def host(self) -> HostFacts:
        """The process and its host."""
        shared, free = _shared_memory()
        return HostFacts(
            python=f"{platform.python_version()} {platform.python_implementation()}",
            platform=platform.platform(),
            num_cores=_num_cores(),
            memory_bytes=_memory_bytes(),
            shared_memory_bytes=shared,
            shared_memory_free_bytes=free,
            open_files=_open_files(),
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
