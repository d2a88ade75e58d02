"""Whole units over ranks of unequal speed: forms, cuts, the segments between them, and shares.

The form of a tensor-parallel group is the relative speeds of its ranks, which decide its cuts. A
segment is a range of units between the cuts of all forms, so it has one owner for each form. With
natural order in every replica, it lies on exactly one rank of each of them: one reduction over
these owners sums its gradients, and nothing moves inside a tensor-parallel group.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from pcomm.core.errors import ConfigError
from pcomm.core.topology import Topology

__all__ = [
    "Form",
    "RankSpeeds",
    "Segment",
    "SegmentGroup",
    "busiest",
    "combined",
    "cuts",
    "fastest",
    "is_plain",
    "least_time_shares",
    "plain",
    "rank_speeds",
    "relative",
    "segment_groups",
    "segments",
    "sizes",
]


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


RankSpeeds = tuple[tuple[int, Fraction], ...]
"""Pairs of a global rank and its speed below 1, ascending by rank; surviving ranks alone."""


def rank_speeds(topology: Topology, speeds: Mapping[int, float | Fraction]) -> RankSpeeds:
    """The slow ranks among the surviving ones, with exact speeds: 0.3 is three tenths.

    Raises:
        ConfigError: A speed outside of 0 < speed <= 1.
        TopologyError: A rank that the topology does not have.
    """
    found = []
    for rank, speed in sorted(speeds.items()):
        topology.coordinates(rank)
        if not 0 < speed <= 1:
            raise ConfigError(
                f"plan: speed {speed} of rank {rank}",
                found=f"{speed}, outside of 0 < speed <= 1",
                why="A speed is relative to that of a healthy rank, and a rank of speed 0 is gone.",
                fix="Give a number above 0 and at most 1, or name the rank among the failures.",
            )
        is_exact = isinstance(speed, int | Fraction)
        exact = Fraction(speed) if is_exact else Fraction(str(float(speed)))
        if exact < 1 and rank not in topology.failed:
            found.append((rank, exact))
    return tuple(found)


def fastest(rates: Sequence[Fraction], degree: int) -> list[int]:
    """Indices of the `degree` fastest ranks, ascending; the earlier of equal ones."""
    if degree == len(rates):
        return list(range(degree))
    return sorted(sorted(range(len(rates)), key=lambda i: -rates[i])[:degree])


def combined(groups: Sequence[Sequence[Fraction]], degree: int) -> Form:
    """Speeds of `degree` ranks for groups that hold the same units: the least at each index.

    Args:
        groups: Speeds of the surviving ranks of each group, ascending on `tp`.
        degree: Number of ranks that are used in each.
    """
    used = [[rates[i] for i in fastest(rates, degree)] for rates in groups]
    return tuple(min(at) for at in zip(*used, strict=True))


@dataclass(frozen=True)
class Segment:
    """Units `start` to `stop - 1`, which one rank holds in each group of a form.

    Args:
        start: First unit.
        stop: The unit after the last one.
        owners: Pairs of a form and the index, in a tensor-parallel group of this form, of the
            rank that holds the units; ascending by degree, then by form.
    """

    start: int
    stop: int
    owners: tuple[tuple[Form, int], ...]

    def owner(self, form: Form | int) -> int:
        """Index of the rank that holds the units in a group of this form, or plain degree."""
        return dict(self.owners)[plain(form) if isinstance(form, int) else form]


@dataclass(frozen=True)
class SegmentGroup:
    """Ranks whose gradients of one range of units are summed.

    Args:
        start: First unit; 0 for a replicated parameter.
        stop: The unit after the last one; 0 for a replicated parameter.
        ranks: Global ranks, ascending: the owner of the range in each tensor-parallel group, or
            all ranks of all groups for a replicated parameter.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]


def segments(count: int, forms: Iterable[Form | int]) -> tuple[Segment, ...]:
    """The segments of `count` units for all `forms` at once, ascending.

    For plain degrees N1 and N2 there are at most N1 + N2 - gcd(N1, N2).

    Args:
        count: Number of units, at least the largest degree.
        forms: Forms of tensor-parallel groups, or plain degrees; repeated ones count once.
    """
    distinct = {plain(form) if isinstance(form, int) else form for form in forms}
    ordered = sorted(distinct, key=lambda form: (len(form), form))
    boundaries = [(form, cuts(count, form)) for form in ordered]
    union = sorted({cut for _, own in boundaries for cut in own})
    return tuple(
        Segment(
            start, stop, tuple((form, bisect_right(own, start) - 1) for form, own in boundaries)
        )
        for start, stop in pairwise(union)
    )


def segment_groups(
    found: Sequence[Segment], groups: Sequence[tuple[int, Sequence[int]]]
) -> tuple[SegmentGroup, ...]:
    """The ranks that hold each segment, one of each tensor-parallel group.

    Args:
        found: Segments of a stage.
        groups: The index of its form among those of the stage, and the ranks that are used, of each
            tensor-parallel group.
    """
    sums = []
    for segment in found:
        # Owners stand in the order of the forms.
        owners = [index for _, index in segment.owners]
        ranks = sorted(own[owners[form]] for form, own in groups)
        sums.append(SegmentGroup(segment.start, segment.stop, tuple(ranks)))
    return tuple(sums)


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
