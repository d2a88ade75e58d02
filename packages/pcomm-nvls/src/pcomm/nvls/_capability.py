"""Facts about one rank, and what the ranks of a group can do together, found by one vote.

The NVLink domain of a GPU is asked of NVML through ctypes, where it spans several hosts. The
structure and the numbers are those of `nvml.h`, `nvmlGpuFabricInfo_t`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Protocol

import torch

from pcomm.core.control.agreement import vote
from pcomm.core.control.control import Control
from pcomm.core.doctor.this_machine import cuda_facts
from pcomm.core.groups.group import Group
from pcomm.core.memory.backing import this_host

__all__ = [
    "DIST",
    "MAX_RANKS",
    "MULTICAST",
    "PEERS",
    "Capability",
    "RankFacts",
    "RankProbe",
    "ThisRank",
    "capability",
    "default_device",
    "nvlink_domain",
    "reasons_by_rank",
]


DIST, PEERS, MULTICAST = 0, 1, 2
"""Levels: torch.distributed alone, access to the memory of peers, and a multicast address too."""

_LEAST_TRITON = (3, 6)
# Multimem instructions, and all that kernels are compiled and tested for, begin with Hopper.
_LEAST_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class RankFacts:
    """What one rank runs on.

    Args:
        is_cuda: True if its tensors are on a CUDA device.
        triton: Version of Triton; empty where it cannot be imported.
        triton_error: Error of its import.
        is_emulated: True if Triton's interpreter runs the kernels.
        compute_capability: Compute capability of the device; None where there is no device.
        symmetric_memory_error: Reason why torch has no symmetric memory; empty where it has.
        has_multicast: True if the driver reports multicast for the device; None if it does not
            know the question.
        domain: Text that ranks have in common if they can reach each other's memory: a host, or an
            NVLink domain of several.
        device: Identity of the device, different for each one; empty for a CPU.
        unreachable: Identities of the devices that this process sees and whose memory its own
            cannot access.
        shares_device: True if several ranks may use one device.
    """

    is_cuda: bool
    triton: str
    domain: str
    triton_error: str = ""
    is_emulated: bool = False
    compute_capability: tuple[int, int] | None = None
    symmetric_memory_error: str = ""
    has_multicast: bool | None = None
    device: str = ""
    unreachable: tuple[str, ...] = ()
    shares_device: bool = False

    @property
    def architecture(self) -> str:
        """Name of the device for the table of algorithms: "sm_90", "emulated" or "cpu"."""
        if self.is_cuda and self.compute_capability is not None:
            major, minor = self.compute_capability
            return f"sm_{major}{minor}"
        return "emulated" if self.is_emulated and not self.is_cuda else "cpu"

    def level(self) -> tuple[int, str]:
        """How far this rank could go with others like it, and why not further."""
        if not self.triton:
            return DIST, f"Triton cannot be imported ({self.triton_error})"
        if _numbers(self.triton) < _LEAST_TRITON:
            least = ".".join(map(str, _LEAST_TRITON))
            return DIST, f"Triton {self.triton} is older than {least}"
        if not self.is_cuda:
            if self.is_emulated:
                return MULTICAST, ""
            return DIST, "tensors are on the CPU: set TRITON_INTERPRET=1 to emulate"
        if self.is_emulated:
            return DIST, "TRITON_INTERPRET=1 is set, which emulates kernels on the CPU only"
        if self.compute_capability is None:
            return DIST, "no CUDA device"
        if self.compute_capability < _LEAST_CAPABILITY:
            return DIST, f"compute capability of {self.architecture} is below 9.0"
        if self.symmetric_memory_error:
            return DIST, f"torch has no symmetric memory ({self.symmetric_memory_error})"
        if self.has_multicast is None:
            return PEERS, "the driver is too old to know of multicast"
        if not self.has_multicast:
            return PEERS, "the driver reports no multicast for the device"
        return MULTICAST, ""


class RankProbe(Protocol):
    """Source of the facts about a rank."""

    def facts(self, device: torch.device) -> RankFacts:
        """The facts about this process with tensors on `device`. Local; any error counts as none.

        Args:
            device: Device of the tensors.
        """
        ...


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_COMPLETED = 3


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvlink_domain(uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str:
    """A text that GPUs of one NVLink domain of several hosts share; empty within one host. Local.

    Args:
        uuid: UUID of the GPU, such as `GPU-5c64...`.
        load: Opens a shared library by name and raises `OSError` if there is none.
    """
    try:
        nvml = load("libnvidia-ml.so.1")
        ask = nvml.nvmlDeviceGetGpuFabricInfo
        if nvml.nvmlInit_v2() != 0:
            return ""
    except (OSError, AttributeError):
        # No driver, or one from before such domains.
        return ""
    try:
        device, info = ctypes.c_void_p(), _FabricInfo()
        name = ctypes.c_char_p(uuid.encode())
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) != 0:
            return ""
        if ask(device, ctypes.byref(info)) != 0:
            return ""
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(info.cluster)
    # A single host has zeros there.
    if info.state != _COMPLETED or info.status != 0 or not any(cluster):
        return ""
    return f"NVLink domain {cluster.hex()}, clique {info.clique}"


class ThisRank:
    """Answers from this process, its device and its driver; see `RankProbe`."""

    def facts(self, device: torch.device) -> RankFacts:
        """The facts about this process. Local."""
        version, error, is_emulated = _triton()
        if device.type != "cuda":
            return RankFacts(False, version, this_host(), error, is_emulated)
        if not torch.cuda.is_available():
            return RankFacts(True, version, this_host(), error, is_emulated)
        number = torch.cuda.current_device() if device.index is None else device.index
        driver, own = cuda_facts(), _identity(number)
        devices = () if driver is None else driver.devices
        others = [other for other in range(torch.cuda.device_count()) if other != number]
        return RankFacts(
            is_cuda=True,
            triton=version,
            domain=nvlink_domain(own) or this_host(),
            triton_error=error,
            is_emulated=is_emulated,
            compute_capability=torch.cuda.get_device_capability(number),
            symmetric_memory_error=_symmetric_memory_error(),
            has_multicast=devices[number].has_multicast if number < len(devices) else None,
            device=own,
            unreachable=tuple(
                _identity(other)
                for other in others
                if not torch.cuda.can_device_access_peer(number, other)
            ),
            # Torch's own switch, for tests on one GPU; it has no multicast then.
            shares_device=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        )


def _triton() -> tuple[str, str, bool]:
    """Version of Triton, error of its import, and whether it interprets kernels."""
    try:
        triton = importlib.import_module("triton")
        emulation = importlib.import_module("pcomm.nvls.primitives.emulation")
    except (ImportError, AttributeError, RuntimeError) as error:
        return "", f"{type(error).__name__}: {error}", False
    return str(triton.__version__), "", bool(emulation.EMULATED.value)


def _symmetric_memory_error() -> str:
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    return f"it has no {' and no '.join(missing)}" if missing else ""


def _identity(number: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


MAX_RANKS = 72
"""Largest group: the ranks of one NVLink domain."""


@dataclass(frozen=True)
class Capability:
    """What all ranks of a group can do; the same on each of them, but for the words of reasons.

    Args:
        multicast: True if a multicast address reaches all of them. Before a workspace is open:
            True if all of them report that they have it.
        peers: True if each can access the memory of each.
        architecture: Name of the device: "sm_90"; "emulated" under Triton's interpreter; "cpu";
            "mixed" where ranks differ.
        world_size: Number of ranks.
        multicast_reason: Reason why there is no multicast, with the ranks that miss it.
        peers_reason: Reason why there is no access, with the ranks that miss it.
    """

    multicast: bool
    peers: bool
    architecture: str
    world_size: int
    multicast_reason: str = ""
    peers_reason: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether there is another way than torch.distributed."""
        return self.multicast or self.peers

    def without_multicast(self, reason: str) -> Capability:
        """The same ranks, of which one got no multicast address."""
        return replace(self, multicast=False, multicast_reason=reason)

    def without_memory(self, reason: str) -> Capability:
        """The same ranks, of which one could not get its memory."""
        return replace(
            self, multicast=False, peers=False, multicast_reason=reason, peers_reason=reason
        )


def capability(
    group: Group,
    *,
    device: torch.device | str | None = None,
    control: Control | None = None,
    probe: RankProbe | None = None,
) -> Capability:
    """What the ranks of a group can do together. Collective: one vote; raises for no lack.

    A rank whose own look at its device fails counts as one that can do nothing, with that error as
    the reason. Memory is not allocated; a workspace may find less when it is opened.

    Args:
        group: Ranks that take part.
        device: Device of the tensors, or its name; by default the current CUDA device, or the CPU
            without one.
        control: Control by which the ranks vote; by default that of `group`.
        probe: Source of the facts about this rank; by default this process and its device.

    Raises:
        PeerTimeoutError: A rank did not come to the vote.
        FencedError: A newer generation than that of the control has begun.
    """
    if group.size == 1:
        alone = "one rank moves nothing"
        return Capability(False, False, "cpu", 1, alone, alone)
    level, told = DIST, _RankReport()
    try:
        where = default_device() if device is None else torch.device(device)
        facts = (ThisRank() if probe is None else probe).facts(where)
        level, reason = facts.level()
        told = _RankReport(
            facts.architecture,
            reason,
            facts.domain,
            facts.device,
            facts.unreachable,
            facts.shares_device,
        )
    except Exception as error:  # any: the vote is what the other ranks wait for
        first_line = str(error).partition("\n")[0]
        told = _RankReport(reason=f"{type(error).__name__}: {first_line}")
    found = vote(group, "nvls: capability", level, json.dumps(asdict(told)), control=control)
    ranks = [_RankReport(**json.loads(text)) for text in found.reasons]
    return _together(group.ranks, found.values, ranks)


@dataclass(frozen=True)
class _RankReport:
    """What a rank tells the others beside its level; see `RankFacts`."""

    architecture: str = "cpu"
    reason: str = ""
    domain: str = ""
    device: str = ""
    unreachable: Sequence[str] = ()
    shares_device: bool = False


def _together(
    names: Sequence[int], levels: Sequence[int], told: Sequence[_RankReport]
) -> Capability:
    """What ranks of these names can do that have told these things. Pure."""
    architectures = {one.architecture for one in told}
    architecture = told[0].architecture if len(architectures) == 1 else "mixed"
    reasons = [one.reason for one in told]
    lost = (
        _lacking(names, levels, reasons, PEERS)
        or _too_many(len(names))
        or _different(names, [one.architecture for one in told], "devices of one architecture")
        or _different(names, [one.domain for one in told], "one host or one NVLink domain")
        or _pairs(names, told)
    )
    if lost:
        return Capability(False, False, architecture, len(names), lost, lost)
    lost = _lacking(names, levels, reasons, MULTICAST)
    if not lost and any(one.shares_device for one in told):
        lost = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set, which takes multicast away"
    return Capability(not lost, True, architecture, len(names), lost)


def _lacking(
    names: Sequence[int], levels: Sequence[int], reasons: Sequence[str], wanted: int
) -> str:
    below = [i for i, level in enumerate(levels) if level < wanted]
    return reasons_by_rank([names[i] for i in below], [reasons[i] for i in below])


def _too_many(size: int) -> str:
    return f"{size} ranks, and at most {MAX_RANKS} reach each other" if size > MAX_RANKS else ""


def _different(names: Sequence[int], values: Sequence[str], wanted: str) -> str:
    if len(set(values)) == 1:
        return ""
    return f"the ranks are not on {wanted}: {reasons_by_rank(names, values)}"


def _pairs(names: Sequence[int], told: Sequence[_RankReport]) -> str:
    for i, j in permutations(range(len(told)), 2):
        mine, theirs = told[i], told[j]
        if not mine.device:
            continue
        if mine.device == theirs.device and not (mine.shares_device and theirs.shares_device):
            return f"rank {names[i]} and rank {names[j]} are on one device"
        if theirs.device in mine.unreachable:
            return f"the device of rank {names[i]} cannot access that of rank {names[j]}"
    return ""


def reasons_by_rank(names: Iterable[int], reasons: Iterable[str]) -> str:
    """One line with each reason once, after the ranks that have it. Pure.

    Args:
        names: Global ranks.
        reasons: Reason of each of them.
    """
    ranks_of: dict[str, list[int]] = {}
    for name, reason in zip(names, reasons, strict=True):
        ranks_of.setdefault(reason, []).append(name)
    return "; ".join(f"{_ranks(found)}: {reason}" for reason, found in ranks_of.items())


def _ranks(found: Sequence[int]) -> str:
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 4 and found[-1] - found[0] == len(found) - 1:
        return f"ranks {found[0]} to {found[-1]}"
    return f"ranks {', '.join(map(str, found))}"


def default_device() -> torch.device:
    """The current CUDA device, or the CPU without one. Local."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
