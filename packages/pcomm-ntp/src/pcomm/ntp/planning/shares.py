"""Whole numbers of equal tasks for receivers of different speeds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["least_time_shares"]


def least_time_shares(total: int, speeds: Sequence[Fraction]) -> tuple[int, ...]:
    """Tasks of each receiver, at least one, so that the last of them ends as early as can be.

    Of equal choices the earlier receiver gets more, so all ranks get the same result.

    Args:
        total: Number of tasks, at least one for each receiver.
        speeds: Speed of each receiver; one of speed 0 gets nothing.
    """
    # Receivers whose exact share is below 1 take one; that leaves fewer for the others, of whom
    # more may then be below 1.
    above = below = {i for i, speed in enumerate(speeds) if speed}
    shares, spare, each = [0] * len(speeds), total, Fraction(0)
    while below:
        each = spare / sum((speeds[i] for i in above), Fraction(0))
        below = {i for i in above if speeds[i] * each < 1}
        above, spare = above - below, spare - len(below)
        for i in below:
            shares[i] = 1
    for i in above:
        shares[i] = int(speeds[i] * each)
    # What is left goes, one after another, to the receiver that ends first with one more.
    ends = [((n + 1) / speeds[i], i) for i, n in enumerate(shares) if n]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):
        _, i = ends[0]
        shares[i] += 1
        heapq.heapreplace(ends, ((shares[i] + 1) / speeds[i], i))
    return tuple(shares)
