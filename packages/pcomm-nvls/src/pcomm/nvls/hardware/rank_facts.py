"""Facts about one rank, and how far it can go by them; a test can describe any machine so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["MULTICAST", "NOTHING", "PEERS", "Probe", "RankFacts"]

NOTHING, PEERS, MULTICAST = 0, 1, 2
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
            return NOTHING, f"Triton cannot be imported ({self.triton_error})"
        if _numbers(self.triton) < _LEAST_TRITON:
            least = ".".join(map(str, _LEAST_TRITON))
            return NOTHING, f"Triton {self.triton} is older than {least}"
        if not self.is_cuda:
            if self.is_emulated:
                return MULTICAST, ""
            return NOTHING, "tensors are on the CPU: set TRITON_INTERPRET=1 to emulate"
        if self.is_emulated:
            return NOTHING, "TRITON_INTERPRET=1 is set, which emulates kernels on the CPU only"
        if self.compute_capability is None:
            return NOTHING, "no CUDA device"
        if self.compute_capability < _LEAST_CAPABILITY:
            return NOTHING, f"compute capability of {self.architecture} is below 9.0"
        if self.symmetric_memory_error:
            return NOTHING, f"torch has no symmetric memory ({self.symmetric_memory_error})"
        if self.has_multicast is None:
            return PEERS, "the driver is too old to know of multicast"
        if not self.has_multicast:
            return PEERS, "the driver reports no multicast for the device"
        return MULTICAST, ""


class Probe(Protocol):
    """Source of the facts about a rank."""

    def facts(self, device: torch.device) -> RankFacts:
        """The facts about this process with tensors on `device`. Local; any error counts as none.

        Args:
            device: Device of the tensors.
        """
        ...


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
