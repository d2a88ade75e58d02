"""Forms: the relative speeds of the ranks of a tensor-parallel group, which decide its cuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

__all__ = ["Form", "busiest", "cuts", "is_plain", "plain", "relative", "sizes"]

Form = tuple[Fraction, ...]
"""Speed of each rank that is used, over that of the fastest; all 1 for a plain degree."""

_ONE = Fraction(1)


def plain(degree: int) -> Form:
    """The form of `degree` ranks of equal speed."""
    return (_ONE,) * degree


def is_plain(rates: Sequence[Fraction]) -> bool:
    """Whether all ranks are equally fast."""
    return list(rates).count(rates[0]) == len(rates)


def relative(rates: Sequence[Fraction]) -> Form:
    """The form of ranks of the speeds `rates`."""
    top = max(rates)
    return tuple(rates) if top == 1 else tuple(rate / top for rate in rates)


def cuts(count: int, over: int | Sequence[Fraction]) -> tuple[int, ...]:
    """Boundaries of `count` units over ranks, from 0 to `count`.

    For a degree they are floor(i * count / degree). For speeds they are floor(share * count) of
    the share of the speeds before a boundary, moved as little as it takes for two conditions: each
    rank has at least one unit, and the slowest rank takes the least time that any cut allows.

    Args:
        count: Number of units, at least the number of ranks.
        over: Number of ranks of equal speed, or the speed of each; only their ratios matter.
    """
    if isinstance(over, int) or is_plain(over):
        degree = over if isinstance(over, int) else len(over)
        return tuple(i * count // degree for i in range(degree + 1))
    scale = math.lcm(*(rate.denominator for rate in over))
    weights = [rate.numerator * (scale // rate.denominator) for rate in over]
    whole, before = sum(weights), list(accumulate(weights))
    most = _most_units(count, weights)
    # Units that the ranks after a boundary can take at most.
    after = [*[*accumulate(reversed(most))][-2::-1], 0]
    found = [0]
    for i, own in enumerate(most):
        least = max(found[-1] + 1, count - after[i])
        largest = min(found[-1] + own, count - (len(most) - 1 - i))
        wanted = count * before[i] // whole
        found.append(min(max(wanted, least), largest))
    return tuple(found)


def sizes(count: int, over: int | Sequence[Fraction]) -> tuple[int, ...]:
    """Number of units of each rank."""
    return tuple(stop - start for start, stop in pairwise(cuts(count, over)))


def busiest(count: int, over: int | Sequence[Fraction]) -> Fraction:
    """Largest number of units of a rank, divided by its speed."""
    if isinstance(over, int):
        return Fraction(-(-count // over))
    return max(size / rate for size, rate in zip(sizes(count, over), over, strict=True))


def _most_units(count: int, weights: Sequence[int]) -> list[int]:
    """Units that each rank can take in the least time that `count` units need; at least one.

    Each next unit goes to the rank that would be done with it first, which no order beats. It
    starts at a time that is too early for `count` units, so a few steps for each rank remain.
    """
    whole, ranks = sum(weights), range(len(weights))
    # Times are integers: a rank of weight w needs multiple // w for a unit.
    multiple = math.lcm(*weights)
    unit = [multiple // weight for weight in weights]
    most = [max(1, (count - len(weights)) * weight // whole) for weight in weights]
    queue = [((most[i] + 1) * unit[i], i) for i in ranks]
    heapq.heapify(queue)
    time = max(most[i] * unit[i] for i in ranks)
    for _ in range(count - sum(most)):
        done, i = queue[0]
        most[i] += 1
        time = max(time, done)
        heapq.heapreplace(queue, (done + unit[i], i))
    return [max(1, time // unit[i]) for i in ranks]
