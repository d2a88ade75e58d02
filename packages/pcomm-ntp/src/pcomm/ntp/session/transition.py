"""How a generation came about, and what that took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pcomm.ntp.reshard import Moved

__all__ = ["Clock", "Transition"]


@dataclass(frozen=True)
class Transition:
    """How a generation came about, as one of its ranks saw it.

    Args:
        generation: Number of the generation.
        reason: Reason for leaving the one before.
        ranks: Ranks of the generation.
        gone: Ranks of the one before whose processes are gone, each with the reason.
        meet_s: Seconds until it was decided who goes on.
        open_s: Seconds until the groups were open.
        build_s: Seconds until the model was built.
        move_s: Seconds until the state had arrived on all ranks.
        moved: Bytes that this rank sent and received; None if no state moved.
    """

    generation: int
    reason: str
    ranks: tuple[int, ...]
    gone: Mapping[int, str]
    meet_s: float
    open_s: float
    build_s: float
    move_s: float
    moved: Moved | None

    @property
    def total_s(self) -> float:
        """Seconds from the first notice of this rank to the state on all ranks."""
        return self.meet_s + self.open_s + self.build_s + self.move_s


class Clock:
    """Seconds between one look and the next."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, or since this clock was made."""
        before, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before
