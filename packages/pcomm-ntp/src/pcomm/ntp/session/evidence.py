"""What is known of ranks that do not answer: what the launcher told, and how long they are silent.

Certain is only what the launcher tells, that a process has ended, and what a process tells of
itself when its program leaves the session. Silence is no more than a suspicion that has become old.
An error of a connection does not tell which rank is at fault, so it excludes none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

__all__ = ["ENDS", "Ends", "Silence"]

ENDS = "pcomm/ended"
"""Prefix of the keys in which the launcher tells ends of processes: `count`, and 1 to `count`."""


class Ends:
    """Ends of processes that the launcher has told, as far as they were read.

    Args:
        store: Store in which the launcher writes them.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        # Of each rank, the last process that has ended, and the reason.
        self._last: dict[int, tuple[int, str]] = {}
        self.num_read = 0

    def read(self) -> bool:
        """Read what is new; returns whether there was any."""
        before, count = self.num_read, int(self._store.add(f"{ENDS}/count", 0))
        while self.num_read < count:
            key = f"{ENDS}/{self.num_read + 1}"
            # The count comes first, and then the text.
            if not self._store.check([key]):
                break
            self.num_read += 1
            rank, incarnation, *reason = self._store.get(key).decode().split(" ", 2)
            if int(incarnation) >= self.next_incarnation(int(rank)):
                self._last[int(rank)] = int(incarnation), "".join(reason)
        return self.num_read > before

    def next_incarnation(self, rank: int) -> int:
        """Incarnation of the first process of `rank` that may live, as far as was told."""
        return self._last.get(rank, (-1, ""))[0] + 1

    def of(self, rank: int, incarnations: Mapping[int, int]) -> str | None:
        """Why the process of `rank` has ended, or None.

        The end of a process that another one has replaced says nothing of that one, also where it
        comes late, as that of a process which stood still.

        Args:
            rank: Global rank.
            incarnations: Number of processes that had a rank before the one of now, by rank; 0
                where it is absent.
        """
        incarnation, reason = self._last.get(rank, (-1, ""))
        return reason or "ended" if incarnation >= incarnations.get(rank, 0) else None


class Silence:
    """How long heartbeats have not changed, by the clock of this process, while it looked.

    Time in which this process did not look, because it was stopped or busy itself, does not count.

    Args:
        longest_look_s: Seconds between two looks that count at most.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_s = longest_look_s
        self._seen: dict[int, tuple[str, float, float]] = {}

    def look(self, rank: int, beat: str, now_s: float) -> float:
        """Note a heartbeat; returns for how many seconds it has been the same."""
        last, at_s, silent_s = self._seen.get(rank, ("", now_s, 0.0))
        if beat == last:
            silent_s += min(now_s - at_s, self._longest_s)
        else:
            silent_s = 0.0
        self._seen[rank] = beat, now_s, silent_s
        return silent_s
