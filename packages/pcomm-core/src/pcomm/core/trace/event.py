"""One event of a trace: a collective, a wait or a computation of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COMPUTE", "WAIT", "Event", "StopIs", "queue_of"]

StopIs = Literal["done", "wait", "launch"]

COMPUTE = "compute"
"""The queue of the computations of a rank."""

WAIT = "wait"
"""The queue of the waits of a rank for asynchronous operations."""


@dataclass(frozen=True)
class Event:
    """A collective, a wait for one, or a computation.

    Args:
        group: Name of the group; empty for a computation.
        role: Role of the group.
        operation: Name of the collective or of the computation.
        bytes: Least number of bytes that this rank had to send for it.
        start_s: Time at which it was issued, in seconds of the clock of its rank.
        stop_s: Time at which it ended, with the meaning given by `stop_is`.
        rank: Global rank on which it happened.
        queue: `"compute"`, `"wait"`, the communicator as `"dp:gather"`, or a name of your own.
        stop_is: Meaning of `stop_s`. `"done"`: the operation had ended. `"wait"`: its end cannot
            be seen, and this is the time at which a wait for it returned. `"launch"`: it runs on
            a device, and this is the time at which the host had queued it.
        blocks: True if the program stood still from start to stop.
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
        """Duration, in seconds."""
        return self.stop_s - self.start_s

    @property
    def is_communication(self) -> bool:
        """Whether it is a collective in flight, and not a computation or a wait."""
        return bool(self.group) and self.queue != WAIT


def queue_of(group: str, role: str) -> str:
    """The name of the queue of a group: `dp:gather`, or `dp` without a role."""
    return f"{group}:{role}" if role else group
