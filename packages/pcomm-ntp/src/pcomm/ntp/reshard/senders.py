"""Choice of senders: ranges of units are spread so that all holders send equally much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pcomm.ntp.reshard.holdings import Interval

__all__ = ["balanced", "lacking", "leveled", "pieces"]


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


def balanced(
    wanted: Sequence[tuple[int, Interval, Sequence[int]]], loads: dict[int, int]
) -> list[tuple[int, list[tuple[int, Interval]]]]:
    """Deal many ranges out, so that no rank sends two units more than another that could send one.

    Args:
        wanted: Target, range of units, and the ranks that hold all of it, preferred first.
        loads: Number of units that each rank sends already; those dealt out are added.

    Returns:
        For each of `wanted` the target, and the senders with their parts of the range.
    """
    dealt = [list(leveled(interval, ranks, loads)) for _, interval, ranks in wanted]
    # Each range was dealt without a look at later ones. It is dealt again as long as that lowers
    # the sum of squares of the loads, an integer; once it does for none, no unit has a better
    # sender.
    improved = True
    while improved:
        improved = False
        for i, (_, interval, ranks) in enumerate(wanted):
            own = {rank: loads.get(rank, 0) for rank in ranks}
            before = sum(load * load for load in own.values())
            for rank, (start, stop) in dealt[i]:
                own[rank] -= stop - start
            again = list(leveled(interval, ranks, own))
            if sum(load * load for load in own.values()) < before:
                dealt[i], improved = again, True
                loads.update(own)
    return [(target, own) for (target, _, _), own in zip(wanted, dealt, strict=True)]
