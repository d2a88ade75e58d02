"""Who holds a position of a dimension, and positions as index tensors."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from pcomm.core.layout import Layout, Run

__all__ = [
    "Permutation",
    "Placed",
    "RowOrder",
    "expand_ranges",
    "inverse_order",
    "is_held_once",
    "layout_edges",
    "missing",
    "overlap",
    "owned_runs",
    "placed_runs",
    "rank_order",
    "run_edges",
    "run_ranks",
]


def run_edges(runs: Sequence[Run]) -> Tensor:
    """`[R, 2]`, int64 on the CPU: start and stop of each run."""
    return _edges([array("q", chain.from_iterable(runs))])


def layout_edges(layout: Layout) -> Tensor:
    """`[R, 2]`, int64 on the CPU: start and stop of each run, rank after rank."""
    return _edges(layout.edges)


def run_ranks(layout: Layout) -> Tensor:
    """`[R]`, int64 on the CPU: the rank that holds each of the runs of `layout_edges`."""
    counts = torch.tensor([len(own) // 2 for own in layout.edges])
    return torch.arange(layout.size).repeat_interleave(counts)


def expand_ranges(starts_R: Tensor, lengths_R: Tensor) -> Tensor:
    """Every position of the first range, then of the second, and so on; int64.

    Args:
        starts_R: `[R]`, int64: first position of each range.
        lengths_R: `[R]`, int64: how many positions follow from there.
    """
    stops_R = lengths_R.cumsum(0)
    shift_R = starts_R - stops_R + lengths_R
    total = int(stops_R[-1]) if len(stops_R) else 0
    return torch.arange(total) + shift_R.repeat_interleave(lengths_R, output_size=total)


def rank_order(layout: Layout) -> Tensor:
    """The positions of the first rank in its local order, then those of the second, and so on.

    For a partition this is the order in which a gather in rank order delivers the dimension:
    row i of the result is position `rank_order(layout)[i]`.
    """
    edges_R2 = layout_edges(layout)
    return expand_ranges(edges_R2[:, 0], edges_R2[:, 1] - edges_R2[:, 0])


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `x[order][inverse_order(order)]` is `x`."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


@dataclass(frozen=True, eq=False)
class Permutation:
    """An order of rows, and the one that undoes it: both ways are gathers, never scatters.

    Args:
        forth: `[rows]`, int64: row i of the result is row `forth[i]`.
        back: `[rows]`, int64: the inverse of `forth`.
    """

    forth: Tensor
    back: Tensor

    @classmethod
    def of(cls, order: Tensor) -> Permutation:
        """The permutation whose row i is row `order[i]`, and its inverse."""
        return cls(order, inverse_order(order))

    @classmethod
    def sorting(cls, keys: Tensor) -> Permutation:
        """What brings rows into the order of their keys; equal keys stay as they are."""
        return cls.of(keys.argsort(stable=True))

    @property
    def inverse(self) -> Permutation:
        """The same two orders the other way round."""
        return Permutation(self.back, self.forth)

    def to(self, device: torch.device) -> Permutation:
        """The same on a device."""
        return Permutation(self.forth.to(device), self.back.to(device))


class RowOrder:
    """The rows of a partition as a gather in rank order delivers them.

    `layout.derived(RowOrder.of)` makes it once, so that exchanges share its index tensors.

    Args:
        order: `[rows]`, int64 on the CPU: gathered row i is row `order[i]` of the whole. Kept, so
            it must not be a tensor of inference mode, which training cannot use.
    """

    def __init__(self, order: Tensor) -> None:
        self.order = order
        self._known: dict[torch.device, Permutation] = {}

    @classmethod
    def of(cls, layout: Layout) -> RowOrder:
        """The order of the rows of a partition."""
        with torch.inference_mode(False):
            return cls(rank_order(layout))

    @cached_property
    def is_natural(self) -> bool:
        """Whether the gathered rows stand in the order of the whole."""
        return torch.equal(self.order, torch.arange(len(self.order)))

    def on(self, device: torch.device) -> Permutation | None:
        """From the whole to the gathered rows; None where that changes nothing."""
        if self.is_natural:
            return None
        if device not in self._known:
            with torch.inference_mode(False):
                self._known[device] = Permutation.of(self.order).to(device)
        return self._known[device]


def _edges(arrays: Iterable[array[int]]) -> Tensor:
    edges = bytearray().join(arrays)
    if not edges:
        return torch.empty(0, 2, dtype=torch.int64)
    return torch.frombuffer(edges, dtype=torch.int64).view(-1, 2)


# Runs of one rank, each with the place in the rank's tensor where it begins.
Placed = list[tuple[Run, int]]


def placed_runs(layout: Layout, rank: int) -> Placed:
    """All runs of `rank`."""
    runs = layout.runs[rank]
    offsets = itertools.accumulate((run.length for run in runs), initial=0)
    return list(zip(runs, offsets, strict=False))


def is_held_once(layouts: Mapping[int, Layout]) -> bool:
    """Whether every element is on exactly one rank: enough elements, and no two regions meet."""
    ranks, total = range(_size(layouts)), math.prod(x.length for x in layouts.values())
    places = [math.prod(x.sizes[rank] for x in layouts.values()) for rank in ranks]
    if sum(places) != total:
        return False
    split = _split(layouts)
    if len(split) == 1 and layouts[split[0]].is_partition:
        return True
    # Two copies on one rank would make up for an element that no rank holds. And where there are no
    # elements at all, their number says nothing of the lengths that regions must have.
    return bool(total) and _held(layouts) == places and not _meeting(layouts, ranks)


def missing(layouts: Mapping[int, Layout], ranks: Sequence[int]) -> str:
    """Why `ranks` together do not hold every element, each with one owner; empty if they do."""
    split = _split(layouts)
    if len(split) <= 1:
        dim = split[0] if split else min(layouts)
        layout = layouts[dim]
        edges = [layout.edges[rank] for rank in ranks]
        chosen = Layout.of_edges(layout.length, edges, are_sound=True)
        return "" if chosen.is_cover else f"not every position of dimension {dim} is held"
    first = _first_of_equal(layouts, ranks)
    if met := _meeting(layouts, first):
        return f"the regions of ranks {met[0]} and {met[1]} overlap in part"
    held, total = _held(layouts), math.prod(layout.length for layout in layouts.values())
    if sum(held[rank] for rank in first) != total:
        return f"ranks hold {held} elements of {total}"
    return ""


def owned_runs(
    layouts: Mapping[int, Layout], ranks: Sequence[int] | None
) -> dict[int, list[Placed]]:
    """What each rank sends, for each dimension: the runs whose owner it is.

    Args:
        layouts: Layouts of a tensor that `ranks` hold completely, by dimension.
        ranks: Ranks that may send, preferred first; None where every element is on one rank.
    """
    size, split = _size(layouts), _split(layouts)
    owned = {d: [placed_runs(x, rank) for rank in range(size)] for d, x in layouts.items()}
    if ranks is None:
        return owned
    if len(split) <= 1:
        dim = split[0] if split else min(layouts)
        owned[dim] = _first_holders(layouts[dim], ranks)
        return owned
    senders = set(_first_of_equal(layouts, ranks))
    return {d: [o if r in senders else [] for r, o in enumerate(own)] for d, own in owned.items()}


def overlap(have: Placed, need: Placed) -> tuple[list[range], list[range]]:
    """Positions that are in both, as places in the tensor of either.

    Both lists stand in the order of `have`, so element i of one is element i of the other.
    """
    mine: list[range] = []
    theirs: list[range] = []
    # Runs of one rank are apart or equal, so their stops ascend with their starts.
    wanted = sorted(need, key=_start)
    stops = [run.stop for run, _ in wanted]
    for run, local in have:
        for other, offset in itertools.islice(wanted, bisect.bisect_right(stops, run.start), None):
            first, last = max(run.start, other.start), min(run.stop, other.stop)
            if first >= last:
                break
            mine.append(range(local + first - run.start, local + last - run.start))
            theirs.append(range(offset + first - other.start, offset + last - other.start))
    return mine, theirs


def _first_holders(layout: Layout, ranks: Sequence[int]) -> list[Placed]:
    """The runs of each rank that none of the ranks before it holds, nor the rank itself earlier."""
    edges = [run_edges(layout.runs[rank]) for rank in ranks]
    held = [expand_ranges(own[:, 0], own[:, 1] - own[:, 0]) for own in edges]
    positions = torch.cat(held)
    slots = torch.arange(len(positions))
    first = slots.new_full((layout.length,), len(slots))
    first.scatter_reduce_(0, positions, slots, "amin")
    is_first = (first[positions] == slots).split([len(own) for own in held])
    owned: list[Placed] = [[] for _ in range(layout.size)]
    for rank, own, mine in zip(ranks, held, is_first, strict=True):
        places = mine.nonzero().flatten()
        # A run ends where the next owned place, or the position that lies there, is no neighbour.
        breaks = ((places.diff() != 1) | (own[places].diff() != 1)).nonzero().flatten() + 1
        for run in places.tensor_split(breaks) if len(places) else ():
            start = int(own[run[0]])
            owned[rank].append((Run(start, start + len(run)), int(run[0])))
    return owned


def _first_of_equal(layouts: Mapping[int, Layout], ranks: Sequence[int]) -> list[int]:
    """Of ranks with equal regions the first one; none that holds nothing."""
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    held = _held(layouts)
    for rank in ranks:
        if held[rank]:
            region = tuple(_region(layout, rank) for layout in layouts.values())
            seen.setdefault(region, rank)
    return list(seen.values())


def _region(layout: Layout, rank: int) -> tuple[int, ...]:
    """Where the positions of `rank` begin and end, the same however its runs are cut."""
    edges: list[int] = []
    for start, stop in sorted(layout.runs[rank]):
        if edges and start <= edges[-1]:
            edges[-1] = max(stop, edges[-1])
        else:
            edges += [start, stop]
    return tuple(edges)


def _meeting(layouts: Mapping[int, Layout], ranks: Sequence[int]) -> tuple[int, int] | None:
    """Two ranks that hold the same element, if there are any."""
    held = _held(layouts)
    filled = [rank for rank in ranks if held[rank]]
    for one, two in itertools.combinations(filled, 2):
        pairs = ((placed_runs(x, one), placed_runs(x, two)) for x in layouts.values())
        if all(overlap(*pair)[0] for pair in pairs):
            return one, two
    return None


def _split(layouts: Mapping[int, Layout]) -> list[int]:
    return [dim for dim, layout in layouts.items() if not layout.is_whole]


def _held(layouts: Mapping[int, Layout]) -> list[int]:
    """Number of elements on each rank, copies on the same rank not counted."""
    edges = ([_region(x, rank) for x in layouts.values()] for rank in range(_size(layouts)))
    return [math.prod(sum(own[1::2]) - sum(own[::2]) for own in region) for region in edges]


def _size(layouts: Mapping[int, Layout]) -> int:
    return next(iter(layouts.values())).size


def _start(placed: tuple[Run, int]) -> int:
    return placed[0].start
