"""How one rank spent the time from a kill to its next committed step, from what it wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pcomm.ntp.bench.attempts import Attempt, first_commit_s

__all__ = ["Left", "Parts", "parts_of", "steps_missing"]


@dataclass(frozen=True)
class Parts:
    """How one rank spent the time from a kill to its next committed step, in seconds.

    Args:
        detect_s: Time until the rank left the operation that it was in.
        agree_s: Time until it was decided who goes on.
        open_s: Time until the new groups were open.
        build_s: Time until the model was built.
        reshard_s: Time until the state had arrived on all ranks.
        step_s: Time of the attempt that was committed.
    """

    detect_s: float
    agree_s: float
    open_s: float
    build_s: float
    reshard_s: float
    step_s: float


@dataclass(frozen=True)
class Left:
    """One change of generation on a rank: its end on the monotonic clock, and seconds by part."""

    ended_s: float
    meet_s: float
    open_s: float
    build_s: float
    move_s: float


def parts_of(
    attempts: Sequence[Attempt], left: Sequence[Left], *, killed_at_s: float, members: int
) -> Parts | None:
    """The parts of one rank's time; None where it changed no generation after the kill."""
    committed_s = first_commit_s(attempts, killed_at_s, members)
    changes = [one for one in left if killed_at_s < one.ended_s <= committed_s]
    if not changes:
        return None
    change = changes[-1]
    inside = change.meet_s + change.open_s + change.build_s + change.move_s
    return Parts(
        change.ended_s - inside - killed_at_s,
        change.meet_s,
        change.open_s,
        change.build_s,
        change.move_s,
        committed_s - change.ended_s,
    )


def steps_missing(attempts: Sequence[Attempt]) -> int:
    """Steps that a rank left out, or counted twice, by the numbers of its attempts."""
    missing = 0
    for one, other in pairwise(attempts):
        # A step that was ready may be applied during the recovery, which the next attempt shows.
        fine = (0, 1) if not other.is_committed else (1,)
        missing += other.step - one.step not in fine
    return missing
