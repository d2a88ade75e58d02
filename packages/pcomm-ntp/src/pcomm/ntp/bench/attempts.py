"""From the attempts at steps that processes print: how long a kill held training up, and its cost.

The same arithmetic serves pcomm and what it is compared with, so that both mean the same by
"recovered": every process that is left has committed a step in which the killed one had no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["Attempt", "Recovery", "first_commit_s", "is_whole", "read_attempts", "recovery_of"]


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step, by one process.

    Args:
        time_s: End of the attempt in seconds on the monotonic clock, which all processes share.
        step: Number of the step.
        is_committed: True where parameters took the step.
        members: Number of members of the job that took part.
    """

    time_s: float
    step: int
    is_committed: bool
    members: int

    def line(self) -> str:
        """The attempt as `read_attempts` reads it."""
        return f"{self.time_s} {self.step} {int(self.is_committed)} {self.members}"


def read_attempts(path: Path) -> list[Attempt]:
    """The attempts in a file of one line each.

    Args:
        path: File that a process appends to; a last line without its end is left out.

    Returns:
        The attempts in the order of the lines; none where the file does not exist yet.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 4:
            time_s, step, is_committed, members = words
            found.append(Attempt(float(time_s), int(step), is_committed == "1", int(members)))
    return found


def is_whole(attempts: Iterable[Sequence[Attempt]], *, members: int, commits: int) -> bool:
    """Whether the last attempts of every process were committed by the whole job.

    Args:
        attempts: Attempts of each process, in order.
        members: Number of members of the whole job.
        commits: Number of attempts of a process that are looked at; fewer are not enough.
    """
    return all(
        len(own) >= commits and all(a.is_committed and a.members == members for a in own[-commits:])
        for own in attempts
    )


def first_commit_s(attempts: Sequence[Attempt], after_s: float, members: int) -> float:
    """End of the first attempt after a moment that so many members committed; else infinity."""
    return next(
        (
            one.time_s
            for one in attempts
            if one.time_s > after_s and one.is_committed and one.members == members
        ),
        math.inf,
    )


@dataclass(frozen=True)
class Recovery:
    """What one kill cost.

    Args:
        seconds: Time from the kill to the first step that was committed without the killed process,
            on the slowest of the others.
        repeated: Number of attempts after the kill that ended without a commit, over the others:
            each is a batch of one process that was drawn and not trained on, unless the job
            repeats it.
    """

    seconds: float
    repeated: int


def recovery_of(
    attempts: Mapping[int, Sequence[Attempt]], *, killed_at_s: float, victim: int, members: int
) -> Recovery | None:
    """The recovery after a kill, or None where it has not happened yet.

    Args:
        attempts: Attempts by number of the process, in order.
        killed_at_s: Time of the kill in seconds on the monotonic clock.
        victim: Number of the killed process.
        members: Number of members of the job after the kill, as attempts count them.

    Raises:
        ConfigError: No other process has attempts.
    """
    others = [found for process, found in attempts.items() if process != victim]
    if not others:
        raise ConfigError(
            f"the recovery after the end of process {victim}",
            found="no other process",
            why="Time is taken on those that train on.",
            fix="Use two or more.",
        )
    ends = [first_commit_s(found, killed_at_s, members) for found in others]
    if max(ends) == math.inf:
        return None
    repeated = sum(
        killed_at_s < attempt.time_s < end and not attempt.is_committed
        for found, end in zip(others, ends, strict=True)
        for attempt in found
    )
    return Recovery(max(ends) - killed_at_s, repeated)
