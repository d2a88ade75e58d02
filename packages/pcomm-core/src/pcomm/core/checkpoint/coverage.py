"""The first elements of a box that a list of boxes does not cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Box", "first_gap"]


class Box(NamedTuple):
    """Elements of a tensor between two corners.

    Attributes:
        starts: The first index of each dimension.
        stops: The index behind the last of each dimension.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def at(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """The box of `sizes` at `offsets`."""
        stops = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
        return cls(tuple(offsets), stops)

    @property
    def is_empty(self) -> bool:
        """True if it has no element; a box without dimensions has one."""
        return any(start >= stop for start, stop in zip(self.starts, self.stops, strict=True))

    def without(self, other: Box) -> list[Box]:
        """The elements of this box that are not in `other`, as boxes that do not overlap."""
        common = Box(
            tuple(map(max, self.starts, other.starts)), tuple(map(min, self.stops, other.stops))
        )
        if common.is_empty:
            return [self]
        rest: list[Box] = []
        starts, stops = list(self.starts), list(self.stops)
        # Cut off what lies before and behind, one dimension after another; what remains of the
        # box is then common in that dimension.
        for dim in range(len(starts)):
            for first, last in ((starts[dim], common.starts[dim]), (common.stops[dim], stops[dim])):
                if first < last:
                    rest.append(
                        Box(
                            (*starts[:dim], first, *starts[dim + 1 :]),
                            (*stops[:dim], last, *stops[dim + 1 :]),
                        )
                    )
            starts[dim], stops[dim] = common.starts[dim], common.stops[dim]
        return rest

    def __str__(self) -> str:
        ranges = (f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True))
        return f"[{', '.join(ranges)}]"


def first_gap(whole: Box, parts: Iterable[Box]) -> Box | None:
    """A box of `whole` that no part holds, the one with the lowest corner; None if there is none.

    Args:
        whole: The box to cover.
        parts: Boxes that cover it; they may overlap, and reach beyond it.
    """
    missing = [] if whole.is_empty else [whole]
    # In ascending order, so that what is missing stays one box where parts are rows.
    for part in sorted(parts):
        missing = [rest for box in missing for rest in box.without(part)]
        if not missing:
            return None
    return min(missing, default=None)
