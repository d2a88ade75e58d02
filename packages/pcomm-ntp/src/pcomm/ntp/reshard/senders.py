"""Choice of senders: ranges of units are spread so that all holders send equally much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pcomm.ntp.reshard.holdings import Interval

__all__ = ["lacking", "leveled", "pieces"]


def lacking(wanted: Interval, held: Interval | None) -> list[Interval]:
    """What of `wanted` is not in `held`, ascending: none, one or two ranges."""
    if held is None:
        return [wanted]
    found = [(wanted[0], min(wanted[1], held[0])), (max(wanted[0], held[1]), wanted[1])]
    return [(start, stop) for start, stop in found if start < stop]


def pieces(wanted: Interval, held: Mapping[int, Interval]) -> list[tuple[Interval, list[int]]]:
    """`wanted`, cut wherever the holders change, with the ranks that hold each piece."""
    start, stop = wanted
    inside = {(r, max(a, start), min(b, stop)) for r, (a, b) in held.items()}
    overlaps = [(r, a, b) for r, a, b in inside if a < b]
    edges = sorted({start, stop, *(x for _, a, b in overlaps for x in (a, b))})
    return [
        ((first, last), sorted(r for r, a, b in overlaps if a <= first and last <= b))
        for first, last in pairwise(edges)
    ]


def leveled(
    interval: Interval, candidates: Sequence[int], loads: dict[int, int]
) -> Iterator[tuple[int, Interval]]:
    """Deal a range out to the candidates that have sent least, and add it to their loads.

    Args:
        interval: Range of units, each of which all candidates hold.
        candidates: Ranks, preferred first among equal loads.
        loads: Number of units that each rank sends already.
    """
    start, stop = interval
    order = sorted(candidates, key=lambda rank: loads.get(rank, 0))
    own = [loads.get(rank, 0) for rank in order]
    # The least loaded ranks that can be raised to one level, as many as the units reach.
    used = max(n for n in range(1, len(own) + 1) if n * own[n - 1] - sum(own[:n]) <= stop - start)
    level, extra = divmod(stop - start + sum(own[:used]), used)
    for i, rank in enumerate(order[:used]):
        count = level - own[i] + (i < extra)
        if count:
            loads[rank] = own[i] + count
            yield rank, (start, start + count)
            start += count
