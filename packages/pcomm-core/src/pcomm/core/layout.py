"""Which rank holds which part of one tensor dimension: integers only.

A `Layout` gives every rank an ordered list of *runs*, half-open ranges of positions along a
dimension. Even and uneven shards are one run a rank; a fused projection (queries, keys, values
side by side, each split by heads) or a zigzag of tokens is several. A position may lie on several
ranks, as a key head does that serves value heads on each of them. A region of a tensor with
several dimensions is a layout per dimension, see `exchange`.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

from pcomm.core.errors import LayoutError

__all__ = ["Layout", "Run"]

_Derived = TypeVar("_Derived")


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
        runs: The runs of each rank, in the order in which they lie in that rank's tensor.

    Attributes:
        edges: The start and the stop of each run of a rank, one after another, for each rank; not
            to be changed.

    Raises:
        LayoutError: A run outside the dimension, empty, or overlapping another run of its rank; no
            rank, or a length below 0.
    """

    length: int
    edges: tuple[array[int], ...]

    def __init__(self, length: int, runs: Sequence[Sequence[Run]]) -> None:
        self._set(length, tuple(array("q", chain.from_iterable(own)) for own in runs))

    def _set(self, length: int, edges: tuple[array[int], ...], *, are_sound: bool = False) -> None:
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "edges", edges)
        if not edges:
            raise LayoutError(
                "Layout",
                found="no ranks",
                why="A layout says what each rank of a group holds, and a group has a rank.",
                fix="Give at least one tuple of runs.",
            )
        if length < 0:
            raise LayoutError(
                f"Layout of {length} positions",
                found="a length below 0",
                why="A dimension has at least 0 positions.",
                fix="Give the length of the whole dimension.",
            )
        for rank, own in enumerate(edges):
            if not are_sound and not _is_sound(own, length):
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

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[int, tuple[array[int], ...]]]:
        # Without what was derived from it: a pickle is integers.
        return _of_sound_edges, (self.length, self.edges)

    # -- ways to make one ----------------------------------------------------------------

    @classmethod
    def of_edges(
        cls, length: int, edges: Iterable[array[int]], *, are_sound: bool = False
    ) -> Layout:
        """From the starts and stops of each rank, as the attribute `edges` has them.

        Args:
            length: Number of positions of the whole dimension.
            edges: The start and the stop of each run of a rank, for each rank.
            are_sound: True if the runs are sound by construction: thousands are not looked at.

        Raises:
            LayoutError: A run outside the dimension, empty, or overlapping another run of its
                rank.
        """
        layout = cls.__new__(cls)
        # Those of another width would be equal, and have other bytes: the hash is taken from these.
        own = tuple(o if o.typecode == "q" else array("q", o) for o in edges)
        layout._set(length, own, are_sound=are_sound)
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
    def cuts(cls, length: int, size: int, *, unit: int = 1) -> Layout:
        """Contiguous shards of whole units, cut at `floor(i * units / size)`: 10 over 4 is 2,3,2,3.

        Shards differ by at most one unit, as with `balanced`. Cuts at equal fractions are equal
        for all sizes, so layouts over different numbers of ranks share as many cuts as they can.

        Raises:
            LayoutError: `length` is not made of whole units, or `size` is no number of ranks.
        """
        _check_units(length, size, unit)
        edges = [i * (length // unit) // size * unit for i in range(size + 1)]
        return cls.uneven([stop - start for start, stop in pairwise(edges)])

    @classmethod
    def repeated(cls, length: int, size: int, *, unit: int = 1, copies: int) -> Layout:
        """Every unit `copies` times in a row, and of that equal contiguous shards.

        This is how key heads are dealt out with the value heads that they serve: 3 units in 2
        copies over 2 ranks are 0,0,1 and 1,2,2. A unit may be on a rank more than once.

        Args:
            length: Number of positions of the whole dimension.
            size: Number of ranks.
            unit: Positions of a unit, such as the columns of a head.
            copies: Number of times each unit occurs, on all ranks together.

        Raises:
            LayoutError: The units with their copies are not `size` equal shares, or `copies` is
                less than 1.
        """
        _check_units(length, size, unit)
        total = length // unit * copies
        if copies < 1 or total % size:
            raise LayoutError(
                f"Layout.repeated: {length // unit} units of {unit} over {size} ranks",
                found=f"{copies} copies of each, so {total} in all",
                why="Every rank holds the same number of units, copies counted.",
                fix="Use copies >= 1 whose number in all is a multiple of the ranks.",
            )
        if copies == 1:
            return cls.even(length, size, unit=unit)
        share, edges = total // size, []
        for rank in range(size):
            starts = [i // copies * unit for i in range(rank * share, (rank + 1) * share)]
            edges.append(array("q", chain.from_iterable((s, s + unit) for s in starts)))
        return cls.of_edges(length, edges, are_sound=True)

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
        edges = [array("q") for _ in range(chosen[0].size)]
        offset = 0
        for part in chosen:
            for rank, own in enumerate(part.edges):
                edges[rank].extend(edge + offset for edge in own)
            offset += part.length
        return cls.of_edges(offset, edges, are_sound=True)

    # -- what it says --------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.edges)

    @cached_property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of each rank, in the order in which they lie in that rank's tensor."""
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
    def is_cover(self) -> bool:
        """Whether every position is held by at least one rank."""
        reach = 0
        for start, stop in sorted(chain.from_iterable(self.runs)):
            if start > reach:
                return False
            reach = max(reach, stop)
        return reach == self.length

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

    def derived(self, make: Callable[[Layout], _Derived]) -> _Derived:
        """What `make(self)` returns, made once and kept as long as the layout.

        It must not hold the layout itself: without a cycle, index tensors are freed with it.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        made: _Derived = self._derived[make]
        return made

    def adopt(self, make: Callable[[Layout], object], made: object) -> None:
        """Keep `made`, which is known already, as what `make(self)` would return."""
        self._derived[make] = made

    @cached_property
    def _derived(self) -> dict[Callable[..., object], Any]:
        return {}

    def describe(self) -> str:
        """One line, such as `12 positions: 0-5 | 6-11`."""
        return f"{self.length} positions: " + " | ".join(_ranges(own) for own in self.runs)


def _of_sound_edges(length: int, edges: tuple[array[int], ...]) -> Layout:
    return Layout.of_edges(length, edges, are_sound=True)


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
