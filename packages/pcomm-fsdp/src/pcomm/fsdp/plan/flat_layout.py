"""The offsets of parameters in a flat buffer with equal shards: integers only.

Shards end at row boundaries, so that a rank holds whole rows of each parameter: optimizers that
look at rows, block-wise quantisation and checkpoints then need no cooperation between ranks. That
is made by padding before parameters, as little as there can be for an order of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

__all__ = ["FlatLayout", "ShardRange", "plan_flat_layout"]

# Shard lengths tried for each unit that a shard length may be a multiple of.
_TRIES = 64


class ShardRange(NamedTuple):
    """The range of one parameter in one rank's shard, in elements.

    Attributes:
        start: First element of the range in the flattened parameter.
        length: Length of the range; 0 for a rank that holds nothing of the parameter.
        offset: First element of the range in the rank's shard.
    """

    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of parameters in a buffer of `size` equal shards.

    Args:
        shapes: Shape of each parameter.
        offsets: First element of each parameter in the buffer.
        shard_length: Elements of each rank's shard.
        size: Number of ranks.
        is_row_aligned: True if every shard ends at a row boundary of the parameter it cuts. A row
            is everything behind one index of the first dimension. If False, some parameters are
            cut inside rows; see `is_cut_inside_rows`.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    shard_length: int
    size: int
    is_row_aligned: bool

    @property
    def length(self) -> int:
        """Elements of the whole buffer."""
        return self.shard_length * self.size

    @cached_property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.length - self.num_elements

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of padding: begins and ends, ascending."""
        ends = [0]
        begins = []
        for begin, shape in sorted(zip(self.offsets, self.shapes, strict=True)):
            begins.append(begin)
            ends.append(begin + math.prod(shape))
        begins.append(self.length)
        pairs = zip(ends, begins, strict=True)
        return tuple((begin, end) for begin, end in pairs if begin < end)

    @property
    def is_one_parameter(self) -> bool:
        """True if the buffer is a single parameter and nothing else."""
        return len(self.shapes) == 1 and not self.padding

    def shard_range(self, index: int, rank: int) -> ShardRange:
        """The range of parameter `index` that `rank` holds."""
        begin = self.offsets[index]
        end = begin + math.prod(self.shapes[index])
        first = max(begin, rank * self.shard_length)
        last = min(end, (rank + 1) * self.shard_length)
        if last <= first:
            return ShardRange(0, 0, 0)
        return ShardRange(first - begin, last - first, first - rank * self.shard_length)

    def is_entire(self, index: int) -> bool:
        """True if one rank holds all of parameter `index`."""
        return sum(self.shard_range(index, rank).length > 0 for rank in range(self.size)) <= 1

    def is_cut_inside_rows(self, index: int) -> bool:
        """True if a rank holds only some of a row of parameter `index`."""
        return not self.is_row_aligned and self._cut_inside_rows[index]

    @cached_property
    def _cut_inside_rows(self) -> tuple[bool, ...]:
        cut = []
        for begin, shape in zip(self.offsets, self.shapes, strict=True):
            row, end = max(1, row_length(shape)), begin + math.prod(shape)
            boundaries = range(
                (begin // self.shard_length + 1) * self.shard_length, end, self.shard_length
            )
            cut.append(any((boundary - begin) % row for boundary in boundaries))
        return tuple(cut)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`: whole rows; one dimension if it is cut inside rows."""
        shape, length = self.shapes[index], self.shard_range(index, rank).length
        if not shape:
            return shape if length else (0,)
        if self.is_cut_inside_rows(index):
            return (length,)
        row = row_length(shape)
        return (length // row if row else shape[0], *shape[1:])

    def describe(self) -> str:
        """One line: sizes, padding, and how shards are cut."""
        sizes = f"{self.num_elements} elements over {self.size} ranks, {self.shard_length} each"
        percent = 100 * self.padding / max(1, self.length)
        num_cut = sum(map(self.is_cut_inside_rows, range(len(self.shapes))))
        inside = f"inside rows of {num_cut} parameters: at rows takes too much padding"
        cut = inside if num_cut else "at rows"
        return f"{sizes}, padding {self.padding} ({percent:.1f} %), cut {cut}"


def plan_flat_layout(
    shapes: Sequence[Sequence[int]], size: int, *, alignment: int = 1, max_padding: float = 0.1
) -> FlatLayout:
    """The layout with the smallest shards, among a few orders of the parameters.

    Args:
        shapes: Shape of each parameter.
        size: Number of ranks.
        alignment: Every parameter begins at a multiple of so many elements, and so does each shard.
        max_padding: Largest fraction of the buffer that may be padding for the sake of rows; what
            the alignment alone costs does not count. Beyond it shards are cut inside rows.
    """
    known = tuple(tuple(shape) for shape in shapes)
    numels = [math.prod(shape) for shape in known]
    packed, end = _packed(numels, alignment)
    least = _round_up(-(-end // size), alignment)
    if size == 1:
        return FlatLayout(known, packed, least, 1, True)
    rows = [max(1, row_length(shape)) for shape in known]
    limit = max(least, math.floor(least / (1 - max_padding)))
    best: tuple[int, list[int]] | None = None
    for order in _orders(rows, numels):
        for shard_length in _candidates(rows, least, limit, alignment):
            if best is not None and shard_length >= best[0]:
                break
            offsets = _place(order, rows, numels, shard_length, size, alignment)
            if offsets is not None:
                best = shard_length, offsets
                break
    if best is None:
        return FlatLayout(known, packed, least, size, all(row == 1 for row in rows))
    return FlatLayout(known, tuple(best[1]), best[0], size, True)


def row_length(shape: Sequence[int]) -> int:
    """Elements behind one index of the first dimension."""
    return math.prod(shape[1:])


def _packed(numels: Sequence[int], alignment: int) -> tuple[tuple[int, ...], int]:
    """Offsets with no more between parameters than the alignment asks for, and where they end."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(_round_up(end, alignment))
        end = offsets[-1] + numel
    return tuple(offsets), end


def _orders(rows: Sequence[int], numels: Sequence[int]) -> Iterable[list[int]]:
    given = list(range(len(rows)))
    yield given
    # Long rows first: short rows fill what is left of a shard.
    yield sorted(given, key=lambda i: (-rows[i], i))
    yield sorted(given, key=lambda i: (rows[i], i))
    yield sorted(given, key=lambda i: (-numels[i], i))


def _candidates(rows: Sequence[int], least: int, limit: int, alignment: int) -> list[int]:
    """Shard lengths to try, ascending: a parameter cut twice needs a shard of whole rows of it."""
    units, multiple = {alignment}, alignment
    for row in sorted(set(rows)):
        units.add(math.lcm(row, alignment))
        multiple = math.lcm(multiple, row)
        units.add(multiple)
    lengths: set[int] = {least}
    for unit in units:
        lengths.update(islice(range(_round_up(least, unit), limit + 1, unit), _TRIES))
    return sorted(lengths)


def _place(
    order: Sequence[int],
    rows: Sequence[int],
    numels: Sequence[int],
    shard_length: int,
    size: int,
    alignment: int,
) -> list[int] | None:
    """Offsets by parameter, each as early as it can be; None if they do not fit.

    Earlier is never worse: whatever follows a parameter may stay where it is.
    """
    offsets = [0] * len(order)
    end = 0
    for index in order:
        start = _first_fit(
            _round_up(end, alignment), rows[index], numels[index], shard_length, alignment
        )
        if start is None:
            return None
        offsets[index], end = start, start + numels[index]
        if end > shard_length * size:
            return None
    return offsets


def _first_fit(start: int, row: int, numel: int, shard_length: int, alignment: int) -> int | None:
    """The first aligned place from `start` where the ends of shards meet boundaries of rows."""
    # From a boundary of shards on everything repeats, so one more period tells all.
    period = math.lcm(row, alignment) // alignment
    boundary = _round_up(start, shard_length)
    for first in (start,) if start == boundary else (start, boundary):
        for begin in islice(range(first, first + shard_length, alignment), period):
            first_end = (begin // shard_length + 1) * shard_length
            num_ends = max(0, -(-(begin + numel) // shard_length) - begin // shard_length - 1)
            meets = (first_end - begin) % row == 0
            if num_ends == 0 or (meets and (num_ends == 1 or shard_length % row == 0)):
                return begin
            if num_ends > 1 and shard_length % row:
                # The second end inside misses a boundary of rows, and later begins have it too.
                break
    return None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
