"""Where a rank stands in a plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """The position of a surviving rank among the ranks that are used.

    Args:
        replica: Coordinate on `dp`.
        stage: Coordinate on `pp`, 0 without that axis.
        index: Position in its tensor-parallel group, counted from 0 over the ranks that are
            used; -1 if the rank is idle.
        degree: Number of ranks that are used in that group.
        is_idle: True for a rank that survived and has no units.
    """

    replica: int
    stage: int
    index: int
    degree: int
    is_idle: bool
