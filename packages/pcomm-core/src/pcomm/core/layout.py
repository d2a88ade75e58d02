"""Which rank holds which part of one tensor dimension: integers only.

A `Layout` gives every rank an ordered list of *runs*, half-open ranges of positions along a
dimension. Even and uneven shards are one run a rank; a fused projection (queries, keys, values
side by side, each split by heads) or a zigzag of tokens is several. A region of a tensor with
several dimensions is a layout per dimension, see `exchange`.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from pcomm.core.errors import LayoutError

__all__ = ["Layout", "Run"]


class Run(NamedTuple):
    """Positions `start` to `stop - 1` of a dimension."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.stop - self.start


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """The runs of positions that each rank of a group holds along one dimension.

    Kept as plain integers, because a pack of a thousand sequences has thousands of runs and is
    laid out anew for every micro-batch.

    Args:
        length: Number of positions of the whole dimension.
        runs: For each rank its runs, in the order in which they lie in that rank's tensor.

    Attributes:
        edges: For each rank the start and the stop of its runs, one after another; not to be
            changed.

    Raises:
        LayoutError: A run outside the dimension, empty, or overlapping another run of its rank.
    """

    length: int
    edges: tuple[array[int], ...]

    def __init__(self, length: int, runs: Sequence[Sequence[Run]]) -> None:
        self._set(length, tuple(array("q", chain.from_iterable(own)) for own in runs))

    def _set(self, length: int, edges: tuple[array[int], ...]) -> None:
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "edges", edges)
        if not edges:
            raise LayoutError(
                "Layout",
                found="no ranks",
                why="A layout says what each rank of a group holds, and a group has a rank.",
                fix="Give at least one tuple of runs.",
            )
        for rank, own in enumerate(edges):
            if not _is_sound(own, length):
                raise LayoutError(
                    f"Layout of {length} positions",
                    found=f"rank {rank} has runs {_ranges(self.runs[rank])}",
                    why="Runs are non-empty, lie inside the dimension and do not overlap.",
                    fix="Correct the runs; a rank that holds nothing has no runs.",
                )

    def __hash__(self) -> int:
        return hash((self.length, *(own.tobytes() for own in self.edges)))

    def __repr__(self) -> str:
        return f"Layout(length={self.length}, runs={self.runs})"

    # -- ways to make one ----------------------------------------------------------------

    @classmethod
    def of_edges(cls, length: int, edges: Iterable[array[int]]) -> Layout:
        """From the starts and stops of each rank, as the attribute `edges` has them.

        Raises:
            LayoutError: See the class.
        """
        layout = cls.__new__(cls)
        # Those of another width would be equal, and have other bytes: the hash is taken from these.
        layout._set(length, tuple(o if o.typecode == "q" else array("q", o) for o in edges))
        return layout

    @classmethod
    def even(cls, length: int, size: int, *, unit: int = 1) -> Layout:
        """Equal contiguous shards of whole units, such as heads of `unit` columns.

        Raises:
            LayoutError: `length` is not `size` equal shares of whole units.
        """
        _check_units(length, size, unit)
        if length % (size * unit):
            raise LayoutError(
                f"Layout.even: {length} positions over {size} ranks",
                found=f"{length // unit} units of {unit}, a remainder of {length // unit % size}",
                why="Even shards need the number of units to be a multiple of the ranks.",
                fix="Change the size or the ranks, or use Layout.balanced for uneven shards.",
            )
        return cls.uneven([length // size] * size)

    @classmethod
    def balanced(cls, length: int, size: int, *, unit: int = 1) -> Layout:
        """Contiguous shards of whole units that differ by at most one unit, larger ones first."""
        _check_units(length, size, unit)
        share, rest = divmod(length // unit, size)
        return cls.uneven([(share + (rank < rest)) * unit for rank in range(size)])

    @classmethod
    def uneven(cls, sizes: Sequence[int]) -> Layout:
        """Contiguous shards of the given sizes, in rank order; a size may be zero."""
        runs, start = [], 0
        for rank, size in enumerate(sizes):
            if size < 0:
                raise LayoutError(
                    f"Layout.uneven: sizes {list(sizes)}",
                    found=f"rank {rank} has size {size}",
                    why="A shard cannot hold fewer than zero positions.",
                    fix="Use sizes >= 0.",
                )
            runs.append((Run(start, start + size),) if size else ())
            start += size
        return cls(start, tuple(runs))

    @classmethod
    def whole(cls, length: int, size: int) -> Layout:
        """Every rank holds the whole dimension."""
        return cls(length, ((Run(0, length),) if length else (),) * size)

    @classmethod
    def sections(cls, parts: Iterable[Layout]) -> Layout:
        """Dimensions laid side by side, each with a layout of its own, as in a fused projection.

        The position of a part is shifted by the lengths of the parts before it, and a rank
        holds its share of the first part, then of the second, and so on.
        """
        chosen = list(parts)
        if not chosen or len({part.size for part in chosen}) != 1:
            raise LayoutError(
                "Layout.sections",
                found=f"parts over {[part.size for part in chosen]} ranks",
                why="All parts are held by the same group of ranks.",
                fix="Give at least one part, all with the same number of ranks.",
            )
        runs: list[list[Run]] = [[] for _ in range(chosen[0].size)]
        offset = 0
        for part in chosen:
            for rank, own in enumerate(part.runs):
                runs[rank] += [Run(run.start + offset, run.stop + offset) for run in own]
            offset += part.length
        return cls(offset, tuple(tuple(own) for own in runs))

    # -- what it says --------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.edges)

    @cached_property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """For each rank its runs, in the order in which they lie in that rank's tensor."""
        # `Run(...)` would be a call of Python code for each of thousands.
        run: Callable[[tuple[int, int]], Run] = partial(tuple.__new__, Run)
        return tuple(tuple(map(run, zip(own[::2], own[1::2], strict=True))) for own in self.edges)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions each rank holds."""
        return tuple(sum(own[1::2]) - sum(own[::2]) for own in self.edges)

    @cached_property
    def is_partition(self) -> bool:
        """Whether every position is held by exactly one rank."""
        # Where one run stops the next one starts: then one more has started than stopped at each
        # position, so sorting starts and stops apart proves it.
        starts = sorted(chain.from_iterable(own[::2] for own in self.edges))
        stops = sorted(chain.from_iterable(own[1::2] for own in self.edges))
        return [0, *stops] == [*starts, self.length]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole dimension in its natural order."""
        # The sizes first: they rule out most layouts without a look at every run.
        return all(size == self.length for size in self.sizes) and all(
            _merge(own) in ([Run(0, self.length)], []) for own in self.runs
        )

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the ranks hold one run each, in rank order, that together are the dimension.

        Then a plain gather in rank order restores the dimension.
        """
        flat = [run for own in self.runs for run in _merge(own)]
        return self.is_partition and flat == sorted(flat, key=lambda run: run.start)

    def positions(self, rank: int) -> list[int]:
        """Every position that `rank` holds, in its local order."""
        return [position for run in self.runs[rank] for position in range(run.start, run.stop)]

    def describe(self) -> str:
        """One line, such as `12 positions: 0-5 | 6-11`."""
        return f"{self.length} positions: " + " | ".join(_ranges(own) for own in self.runs)


def _is_sound(own: array[int], length: int) -> bool:
    """Whether runs are not empty, lie inside the dimension and do not overlap."""
    edges = own.tolist()
    if not all(map(operator.lt, edges[::2], edges[1::2])):
        return False
    if not all(map(operator.le, edges[1::2], edges[2::2])):
        # Not in ascending order, or overlapping: only sorting them tells.
        edges = [*chain.from_iterable(sorted(zip(edges[::2], edges[1::2], strict=True)))]
        if not all(map(operator.le, edges[1::2], edges[2::2])):
            return False
    return not edges or (edges[0] >= 0 and edges[-1] <= length)


def _merge(runs: Iterable[Run]) -> list[Run]:
    """Runs with neighbours that touch joined into one."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return merged


def _ranges(runs: Iterable[Run]) -> str:
    return ",".join(f"{run.start}-{run.stop - 1}" for run in runs) or "nothing"


def _check_units(length: int, size: int, unit: int) -> None:
    if size < 1 or unit < 1 or length < 0 or length % unit:
        raise LayoutError(
            f"Layout: {length} positions in units of {unit} over {size} ranks",
            found=f"{length} = {length // unit if unit > 0 else '?'} units and a remainder",
            why="A dimension is split between whole units over at least one rank.",
            fix="Make the length a multiple of the unit, and the number of ranks at least 1.",
        )
