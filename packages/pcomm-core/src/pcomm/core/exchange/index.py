"""Positions of a dimension as index tensors: runs of neighbours written out, without a loop."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from pcomm.core.layout import Layout, Run

__all__ = [
    "Permutation",
    "RowOrder",
    "expand_ranges",
    "inverse_order",
    "layout_edges",
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
