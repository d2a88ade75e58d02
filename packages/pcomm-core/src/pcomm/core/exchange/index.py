"""Positions of a dimension as index tensors: runs of neighbours written out, without a loop."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from pcomm.core.layout import Layout, Run

__all__ = [
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
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _edges(arrays: Iterable[array[int]]) -> Tensor:
    edges = bytearray().join(arrays)
    if not edges:
        return torch.empty(0, 2, dtype=torch.int64)
    return torch.frombuffer(edges, dtype=torch.int64).view(-1, 2)
