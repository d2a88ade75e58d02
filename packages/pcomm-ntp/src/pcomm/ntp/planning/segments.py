"""Segments: ranges of units between the cuts of all degrees, each with one owner per degree.

With natural order in every replica, a segment lies on exactly one rank of each of them. So one
reduction over these owners sums its gradients, and nothing moves inside a tensor-parallel group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Segment", "cuts", "segments"]


@dataclass(frozen=True)
class Segment:
    """Units `start` to `stop - 1`, which one rank holds at each degree.

    Args:
        start: First unit.
        stop: The unit after the last one.
        owners: Pairs of a degree and the place, in a tensor-parallel group of this degree, of the
            rank that holds the units; ascending by degree.
    """

    start: int
    stop: int
    owners: tuple[tuple[int, int], ...]

    def owner(self, degree: int) -> int:
        """Place of the rank that holds the units in a group of `degree` ranks."""
        return dict(self.owners)[degree]


def cuts(count: int, degree: int) -> tuple[int, ...]:
    """Boundaries of `count` units over `degree` ranks: floor(i * count / degree), 0 to `count`."""
    return tuple(i * count // degree for i in range(degree + 1))


def segments(count: int, degrees: Iterable[int]) -> tuple[Segment, ...]:
    """The segments of `count` units for all `degrees` at once, ascending.

    For degrees N1 and N2 there are at most N1 + N2 - gcd(N1, N2).

    Args:
        count: Number of units, at least the largest degree.
        degrees: Tensor-parallel degrees; repeated ones count once.
    """
    boundaries = {degree: cuts(count, degree) for degree in sorted(set(degrees))}
    union = sorted({cut for own in boundaries.values() for cut in own})
    return tuple(
        Segment(
            start,
            stop,
            tuple((degree, bisect_right(own, start) - 1) for degree, own in boundaries.items()),
        )
        for start, stop in pairwise(union)
    )
