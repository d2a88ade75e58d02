"""The first difference between lists that should be equal on all ranks, and its rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Divergence", "first_divergence"]


@dataclass(frozen=True)
class Divergence:
    """The first place at which ranks differ.

    Args:
        index: Place in the lists, from 0.
        rank: Lowest rank that is not with the majority.
        line: Line of `rank` at that place.
        other_rank: Lowest rank of the majority; with a tie, the lowest rank of all.
        other_line: Line of `other_rank` at that place.
    """

    index: int
    rank: int
    line: str
    other_rank: int
    other_line: str


def first_divergence(lines: Mapping[int, Sequence[str]]) -> Divergence | None:
    """The first index at which two ranks hold different lines, or None. Local.

    A list that ends earlier than others differs from none of them: it may not be complete.

    Args:
        lines: Lines of each rank, in order.
    """
    for index in range(max(map(len, lines.values()), default=0)):
        there = {rank: lines[rank][index] for rank in sorted(lines) if len(lines[rank]) > index}
        # The first of the most common ones, and so that of the lowest rank where there is a tie.
        (usual, _), *others = Counter(there.values()).most_common()
        if others:
            rank = next(rank for rank, line in there.items() if line != usual)
            other = next(rank for rank, line in there.items() if line == usual)
            return Divergence(index, rank, there[rank], other, usual)
    return None
