"""Checks of the process and its host: Python, cores, memory, shared memory, open files."""

from __future__ import annotations

from collections.abc import Iterable

from pcomm.core.doctor.probe import Probe
from pcomm.core.doctor.report import Finding

__all__ = ["check_open_files", "check_process", "check_shared_memory"]

_MIB = 2**20
_GIB = 2**30

# A rank keeps several descriptors open for every peer; 1,024 is what most systems start with and
# what jobs of a few hundred ranks run into.
_FEW_OPEN_FILES = 4096


def check_process(probe: Probe) -> Iterable[Finding]:
    """Python, the platform, cores and memory."""
    host = probe.host()
    yield Finding("python", "ok", host.python)
    yield Finding("platform", "info", host.platform)
    yield Finding("cores", "info", f"{host.num_cores} usable by this process")
    memory = "not known" if host.memory_bytes is None else f"{host.memory_bytes / _GIB:.1f} GiB"
    yield Finding("memory", "info", memory)


def check_shared_memory(probe: Probe) -> Iterable[Finding]:
    """Room in `/dev/shm`, where ranks on one host exchange data."""
    host = probe.host()
    if host.shared_memory_bytes is None or host.shared_memory_free_bytes is None:
        yield Finding("shared_memory", "missing", "no /dev/shm", "This system has no such folder.")
        return
    total, free = host.shared_memory_bytes, host.shared_memory_free_bytes
    value = f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB free"
    fix = "Give a container more with `--shm-size=8g`, or delete what was left in /dev/shm."
    if free < 16 * _MIB:
        reason = "NCCL and local ranks share buffers there and fail when it is full."
        yield Finding("shared_memory", "broken", value, reason, fix)
    elif free < _GIB:
        reason = "Enough for a few ranks; NCCL takes tens of MiB for each GPU of a host."
        yield Finding("shared_memory", "info", value, reason, fix)
    else:
        yield Finding("shared_memory", "ok", value)


def check_open_files(probe: Probe) -> Iterable[Finding]:
    """The limit of open files."""
    limit = probe.host().open_files
    if limit is None:
        yield Finding("open_files", "info", "limit not known")
    elif limit < _FEW_OPEN_FILES:
        reason = "Ranks keep several descriptors open for every peer; large jobs run out of them."
        fix = f"Run `ulimit -n {_FEW_OPEN_FILES}` or more before starting ranks."
        yield Finding("open_files", "info", f"limit {limit:,}", reason, fix)
    else:
        yield Finding("open_files", "ok", f"limit {limit:,}")
