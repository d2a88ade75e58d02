"""What the ranks of a group can do together, found by one vote."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pcomm.core.control.control import Control
from pcomm.core.groups.group import Group

__all__ = ["Capability", "capability"]


@dataclass(frozen=True)
class Capability:
    """What all ranks of a group can do; the same on each of them.

    Args:
        multicast: True if a multicast address reaches all of them.
        peers: True if each can access the memory of each.
        architecture: Name of the device: "sm_90"; "emulated" under Triton's interpreter; "cpu".
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

    def without_memory(self, reason: str) -> Capability:
        """The same ranks, of which one could not get its memory."""
        return replace(
            self, multicast=False, peers=False, multicast_reason=reason, peers_reason=reason
        )


def capability(
    group: Group, *, device: torch.device | None = None, control: Control | None = None
) -> Capability:
    """What the ranks of a group can do together. Collective: one vote; never raises for a lack."""
    from pcomm.nvls.primitives.emulation import EMULATED

    if EMULATED:
        return Capability(True, True, "emulated", group.size)
    return Capability(False, False, "cpu", group.size, "no CUDA device", "no CUDA device")
