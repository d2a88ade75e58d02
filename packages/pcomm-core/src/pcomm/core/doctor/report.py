"""What a check finds, the facts of a machine that checks ask for, and how findings are printed."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

__all__ = [
    "CudaFacts",
    "DeviceFacts",
    "Finding",
    "HostFacts",
    "MachineProbe",
    "MachineReport",
    "NcclFile",
    "Status",
    "TorchFacts",
]


Status = Literal["ok", "missing", "broken", "info"]

_LINE: Final = 100
_NAME: Final = 24
_INDENT: Final = len("missing  ") + _NAME + 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: Name of the item, such as `"cuda.peer_access"`.
        status: `"ok"`: there and usable. `"missing"`: not there, and features that need it choose
            another way. `"broken"`: there, but will fail or mislead. `"info"`: a fact to know.
        value: Value that was found.
        reason: Reason for a status other than `"ok"`.
        fix: Action that repairs the item; a broken item always has one.
    """

    name: str
    status: Status
    value: str
    reason: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status != "broken" or (self.reason and self.fix), self.name


@dataclass(frozen=True)
class MachineReport:
    """All findings of one examination, in the order of the checks.

    Args:
        findings: Every finding, in order.
    """

    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is broken; what is merely missing does not count."""
        return not any(finding.status == "broken" for finding in self.findings)

    def named(self, name: str) -> Finding:
        """The first finding of that name.

        Raises:
            KeyError: There is none.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"is_healthy": self.is_healthy, "findings": findings}

    def as_text(self) -> str:
        """The report as a table of at most 100 columns; what is broken is named again last."""
        lines = [line for finding in self.findings for line in _lines(finding)]
        counts = [
            f"{sum(finding.status == status for finding in self.findings)} {status}"
            for status in get_args(Status)
        ]
        broken = [finding.name for finding in self.findings if finding.status == "broken"]
        lines += ["", ", ".join(counts)]
        if broken:
            lines += _wrapped("broken: " + ", ".join(broken), indent=len("broken: "))
        return "\n".join(lines)


def _lines(finding: Finding) -> Iterable[str]:
    head = f"{finding.status:<8} {finding.name:<{_NAME}} "
    yield from _wrapped(head + finding.value, indent=_INDENT)
    for label, text in (("", finding.reason), ("fix: ", finding.fix)):
        if text:
            yield from _wrapped(" " * _INDENT + label + text, indent=_INDENT)


def _wrapped(text: str, *, indent: int) -> list[str]:
    # The text starts with its own padding, so only the lines after the first are indented here.
    body = text.splitlines() or [""]
    lines: list[str] = []
    for number, line in enumerate(body):
        start = "" if number == 0 else " " * indent
        lines += textwrap.wrap(
            line,
            _LINE,
            initial_indent=start,
            subsequent_indent=" " * indent,
            drop_whitespace=True,
            replace_whitespace=False,
        )
    return [line.rstrip() for line in lines]


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
        core_limit: Cores whose time the control group of this process may use; None for all.
        memory_limit_bytes: Memory that its control group may use; None for all.
        name: Name of the host.
        addresses: Addresses that the name resolves to, in the order in which gloo tries them.
    """

    python: str
    platform: str
    num_cores: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    open_files: int | None
    core_limit: float | None = None
    memory_limit_bytes: int | None = None
    name: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch.

    Args:
        version: Version of torch, with the local part.
        cuda: CUDA version that it was built for; None for a CPU build.
        is_distributed: True if `torch.distributed` was built.
        backends: Names gloo, nccl and mpi, each with True if torch was built with it.
        nccl: Version of the NCCL that it was built with, such as `"2.27.5"`.
        symmetric_memory: Allocators of symmetric memory that this build has.
        symmetric_memory_error: Error of its import; empty if it works.
        instructions: Sets of vector instructions of this processor, from few to many.
    """

    version: str
    cuda: str | None
    is_distributed: bool
    backends: Mapping[str, bool]
    nccl: str | None
    symmetric_memory: tuple[str, ...]
    symmetric_memory_error: str
    instructions: tuple[str, ...] = ()


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
        nvlinks_to_switch: Number of those links that end at an NVSwitch.
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
        error_code: Number of that error; 0 if the driver works.
    """

    driver: str | None
    cuda: tuple[int, int] | None
    devices: tuple[DeviceFacts, ...]
    error: str = ""
    error_code: int = 0


class MachineProbe(Protocol):
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
