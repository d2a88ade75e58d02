"""Whole rows that change ranks: one sweep over the runs, one copy on either side of the message.

This is how an `Exchange` runs when only the first dimension is split, and how tokens go to experts,
whose numbers are known at run time only. A pack of a thousand
sequences has thousands of runs, and a plan is made for every micro-batch, so runs are worked on
all at once.
"""

# R runs of one rank, S runs of all ranks, P pieces: what a run of one has in common with the other

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.exchange.index import Permutation, expand_ranges, layout_edges, run_ranks
from pcomm.core.layout import Layout

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives

__all__ = ["RowMoves"]


@dataclass(frozen=True, eq=False)
class RowMoves:
    """What one rank sends and receives when rows change ranks.

    Between two layouts it is made by `of`. Where the numbers of rows are known only at run time,
    as those of tokens for experts, it is made from these and the orders on either side.

    Args:
        send_sizes: Number of rows for each peer; None for equal parts.
        receive_sizes: Number of rows from each peer; None for equal parts.
        send: Permutation from the rows as they lie here to those in the order of the peers; None
            where they lie like that.
        receive: Permutation from the rows as they arrive to those of the result; None likewise.
        copies: Number of rows that are sent of each row of the input. They are numbered row by row
            in `send`, and backward adds them up.
    """

    send_sizes: tuple[int, ...] | None
    receive_sizes: tuple[int, ...] | None
    send: Permutation | None
    receive: Permutation | None
    copies: int = 1

    @classmethod
    def of(cls, source: Layout, target: Layout, rank: int, device: torch.device) -> RowMoves:
        """The moves of `rank` from `source` to `target`, two partitions of the same rows."""
        leaving = _meet(source, target, rank)
        order = leaving.peers.argsort(stable=True)
        coming = _meet(target, source, rank)
        # A peer sends its rows in its own order, so that is how they arrive.
        arrival = coming.theirs.argsort()
        arrival = arrival[coming.peers[arrival].argsort(stable=True)]
        lengths = coming.lengths[arrival]
        arrived = torch.empty_like(lengths)
        arrived[arrival] = lengths.cumsum(0) - lengths
        return cls(
            _per_peer(leaving, source.size),
            _per_peer(coming, source.size),
            _permutation(expand_ranges(leaving.mine[order], leaving.lengths[order]), device),
            _permutation(expand_ranges(arrived, coming.lengths), device),
        )

    @property
    def inverse(self) -> RowMoves:
        """The moves that bring every row back, and every copy; nothing is computed for it."""
        return RowMoves(
            self.receive_sizes,
            self.send_sizes,
            self.receive and self.receive.inverse,
            self.send and self.send.inverse,
        )

    def move(self, x: Tensor, collectives: Collectives) -> Tensor:
        """The rows of this rank after the exchange. Collective: one all-to-all, none if alone."""
        if self.send is not None:
            order = self.send.forth if self.copies == 1 else self.send.forth // self.copies
            x = x.index_select(0, order)
        if collectives.size > 1:
            x = collectives.all_to_all(
                x, send_sizes=self.send_sizes, receive_sizes=self.receive_sizes
            )
        return x if self.receive is None else x.index_select(0, self.receive.forth)

    def apply(self, x: Tensor, collectives: Collectives) -> Tensor:
        """`move`, differentiable. Collective: one all-to-all, and one in backward."""
        return with_adjoint(
            x,
            lambda x: self.move(x, collectives),
            lambda gradient: self._add_up(self.inverse.apply(gradient, collectives)),
        )

    def _add_up(self, rows: Tensor) -> Tensor:
        # A sum over neighbours and never an atomic addition, so it is the same in every run.
        return rows if self.copies == 1 else rows.unflatten(0, (-1, self.copies)).sum(1)


class _Pieces(NamedTuple):
    """Rows that one rank has on one side, cut by who has them on the other; in its own order."""

    mine: Tensor
    theirs: Tensor
    peers: Tensor
    lengths: Tensor


def _meet(one: Layout, other: Layout, rank: int) -> _Pieces:
    own_R2, own_places = _placed(Layout.of_edges(one.length, [one.edges[rank]]))
    all_S2, all_places = _placed(other)
    peers_S = run_ranks(other)
    by_start = all_S2[:, 0].argsort()
    starts_S, stops_S = all_S2[by_start].T.contiguous()
    # The other side is a partition, so the runs that one of ours meets are neighbours in it.
    first_R = torch.searchsorted(stops_S, own_R2[:, 0].contiguous(), right=True)
    last_R = torch.searchsorted(starts_S, own_R2[:, 1].contiguous())
    own_P = torch.arange(len(own_R2)).repeat_interleave(last_R - first_R)
    sorted_P = expand_ranges(first_R, last_R - first_R)
    other_P = by_start[sorted_P]
    begin_P = own_R2[own_P, 0].maximum(starts_S[sorted_P])
    end_P = own_R2[own_P, 1].minimum(stops_S[sorted_P])
    return _Pieces(
        own_places[own_P] + begin_P - own_R2[own_P, 0],
        all_places[other_P] + begin_P - all_S2[other_P, 0],
        peers_S[other_P],
        end_P - begin_P,
    )


def _placed(layout: Layout) -> tuple[Tensor, Tensor]:
    """Edges of all runs, and where each starts in the tensor of its rank."""
    edges = layout_edges(layout)
    lengths = edges[:, 1] - edges[:, 0]
    before, sizes = lengths.cumsum(0) - lengths, torch.tensor(layout.sizes)
    return edges, before - (sizes.cumsum(0) - sizes)[run_ranks(layout)]


def _per_peer(pieces: _Pieces, size: int) -> tuple[int, ...]:
    counts = torch.zeros(size, dtype=torch.int64).index_add_(0, pieces.peers, pieces.lengths)
    return tuple(counts.tolist())


def _permutation(order: Tensor, device: torch.device) -> Permutation | None:
    is_natural = torch.equal(order, torch.arange(len(order)))
    return None if is_natural else Permutation.of(order).to(device)
