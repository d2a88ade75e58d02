"""Where to cut a pack of documents into one range for each rank: integers only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["TOLERATED_IMBALANCE", "document_cuts"]

# By how much the busiest rank may have more than its share for the sake of whole documents: above
# it a document is cut, and `auto` takes another strategy where none can be. A first guess; no
# measurement stands behind it yet.
TOLERATED_IMBALANCE = 0.1


def document_cuts(
    cu_seqlens: Sequence[int], size: int, *, limit: float | None = TOLERATED_IMBALANCE
) -> tuple[int, ...]:
    """Where each rank's range of the pack begins, and where the last one ends: `size + 1` tokens.

    With the fewest cuts inside documents that leave no rank more than `limit` above the average,
    or than that rounded up; two cuts at one place, with nothing between them, are one. Under as
    many cuts the busiest rank has the least that is possible. Among those that reach it, cuts at
    boundaries are taken, and those nearest to equal shares, one after another.

    Args:
        cu_seqlens: Offsets of the documents.
        size: Number of ranks.
        limit: 0.1 for 10 % above the average; None to keep all documents whole.
    """
    boundaries = sorted(set(cu_seqlens))
    total = boundaries[-1]
    low = -(-total // size)
    high = total if limit is None else max(low, int(total * (1 + limit)) // size)
    num_cuts = len(_farthest(boundaries, size, high)) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_farthest(boundaries, size, middle, num_cuts)) - 1 <= num_cuts:
            high = middle
        else:
            low = middle + 1
    mirrored = [total - boundary for boundary in reversed(boundaries)]
    back = _farthest(mirrored, size, high)

    def earliest(rank: int, num_cuts: int) -> int:
        """Where `rank` may start if from there on so many cuts are left, its own not counted."""
        return total - back[num_cuts][size - rank - 1] - high

    cuts, left = [0], num_cuts
    for rank in range(1, size):
        wanted, before = rank * total / size, cuts[-1]
        last = min(before + high, total)
        at = _nearest(boundaries, wanted, max(before, earliest(rank, left)), last)
        if at is None:
            # A rank gets nothing where that saves a cut.
            at = before
            if left and (first := max(before, earliest(rank, left - 1))) <= last:
                at, left = min(max(round(wanted), first), last), left - 1
        cuts.append(at)
    return (*cuts, total)


def _farthest(
    boundaries: list[int], size: int, most: int, num_cuts: int | None = None
) -> list[list[int]]:
    """How far the first ranks reach with at most `most` tokens each, `[cuts, ranks]`.

    One line for each number of cuts between boundaries, up to that with which `size` ranks reach
    the end; at most to one line above `num_cuts`. A longer prefix dominates a shorter one: every
    later cut stays available.
    """
    table: list[list[int]] = []
    while not table or (table[-1][-1] < boundaries[-1] and len(table) - 2 != num_cuts):
        line = [0]
        for rank in range(size):
            reach = boundaries[bisect_right(boundaries, line[-1] + most) - 1]
            if table:
                reach = max(reach, min(table[-1][rank] + most, boundaries[-1]))
            line.append(max(reach, line[-1]))
        table.append(line)
    return table


def _nearest(boundaries: list[int], wanted: float, first: int, last: int) -> int | None:
    """The boundary from `first` to `last` nearest to `wanted`, the earlier one of two."""
    low, high = bisect_left(boundaries, first), bisect_right(boundaries, last) - 1
    if low > high:
        return None
    after = min(max(bisect_left(boundaries, wanted), low), high)
    before = max(after - 1, low)
    return min(boundaries[before], boundaries[after], key=lambda boundary: abs(boundary - wanted))
