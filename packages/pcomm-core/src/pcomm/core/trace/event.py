"""One thing that happened on one rank: from when, to when, in which queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COMPUTE", "WAIT", "Event", "StopIs", "queue_of"]

StopIs = Literal["done", "wait", "launch"]

COMPUTE = "compute"
"""The queue of what a rank computes."""

WAIT = "wait"
"""The queue of the times in which a rank stood still for an asynchronous operation."""


@dataclass(frozen=True)
class Event:
    """A collective, a wait for one, or a stretch of computing.

    Args:
        group: Name of the group; empty for what is not communication.
        role: Role of the group.
        operation: Name of the collective or of the stretch.
        bytes: Least number of bytes that this rank had to send for it.
        start_s: When it was issued, in seconds of the clock of its rank.
        stop_s: When it ended; see `stop_is`.
        rank: Global rank on which it happened.
        queue: `"compute"`, `"wait"`, the communicator as `"dp:gather"`, or a name of your own.
        stop_is: What `stop_s` tells. `"done"`: the operation had ended. `"wait"`: its end cannot
            be seen, and this is when a wait for it returned. `"launch"`: it runs on a device, and
            this is when the host had handed it over.
        blocks: Whether the program stood still from start to stop.
    """

    group: str
    role: str
    operation: str
    bytes: int
    start_s: float
    stop_s: float
    rank: int
    queue: str
    stop_is: StopIs = "done"
    blocks: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop_s - self.start_s

    @property
    def is_communication(self) -> bool:
        """Whether something was on its way in a group: neither computing nor a wait."""
        return bool(self.group) and self.queue != WAIT


def queue_of(group: str, role: str) -> str:
    """The queue in which the operations of a group stand: `dp:gather`, or `dp` without a role."""
    return f"{group}:{role}" if role else group
