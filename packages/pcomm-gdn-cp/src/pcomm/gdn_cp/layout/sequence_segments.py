"""How a pack lies on the ranks in pieces, and which pieces come before which: integers only.

A piece is a stretch of one sequence on one rank. A piece that does not end its sequence has a
*slot*: its number among all such pieces, rank after rank, which is the order in which a gather
delivers what belongs to them. There may be thousands, so nothing here loops over them.
"""

# R runs of all ranks, F pieces (of all ranks, or of one), S slots, P tokens before a piece,
# N sequences

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core.exchange.index import expand_ranges, layout_edges, run_ranks
from pcomm.core.layout import Layout
from pcomm.gdn_cp.ops.offsets import PackOffsets

__all__ = ["SegmentTable", "SequenceSegments"]


class SegmentTable(NamedTuple):
    """Pieces, one a row; int64 and bool on the CPU.

    Args:
        start: First token, by its place in the pack.
        stop: The token after the last.
        sequence: Which sequence it is of.
        origin: First token of that.
        rank: Who holds it.
        row: Where it starts in the tensor of its rank.
        goes_on: Whether its sequence goes on after it.
    """

    start: Tensor
    stop: Tensor
    sequence: Tensor
    origin: Tensor
    rank: Tensor
    row: Tensor
    goes_on: Tensor

    def where(self, mask: Tensor) -> SegmentTable:
        """Some of them."""
        return SegmentTable(*(column[mask] for column in self))


@dataclass(frozen=True)
class SequenceSegments:
    """All pieces of all ranks.

    Args:
        cu_seqlens: Offsets of the sequences.
        layout: Which tokens each rank holds; each of them on one.
        reach: How many tokens before itself a convolution looks back: its width less one.
    """

    cu_seqlens: tuple[int, ...]
    layout: Layout
    reach: int

    @cached_property
    def table(self) -> SegmentTable:
        """Every piece, rank after rank and as they lie there; none is empty."""
        begin_R, end_R = layout_edges(self.layout).T.contiguous()
        rank_R = run_ranks(self.layout)
        offsets = torch.tensor(self.cu_seqlens)
        starts, stops = offsets[:-1].clone(), offsets[1:].clone()
        # The sequences that a run meets are neighbours; empty ones among them drop out below.
        first_R = torch.searchsorted(stops, begin_R, right=True)
        count_R = torch.searchsorted(starts, end_R) - first_R
        run_F = torch.arange(len(begin_R)).repeat_interleave(count_R)
        sequence_F = expand_ranges(first_R, count_R)
        start_F = begin_R[run_F].maximum(starts[sequence_F])
        stop_F = end_R[run_F].minimum(stops[sequence_F])
        length_F = stop_F - start_F
        rank_F = rank_R[run_F]
        sizes = torch.tensor(self.layout.sizes)
        row_F = length_F.cumsum(0) - length_F - (sizes.cumsum(0) - sizes)[rank_F]
        origin_F, goes_on_F = starts[sequence_F], stop_F < stops[sequence_F]
        table = SegmentTable(start_F, stop_F, sequence_F, origin_F, rank_F, row_F, goes_on_F)
        return table.where(length_F > 0)

    @cached_property
    def slots(self) -> SegmentTable:
        """The pieces that go on elsewhere, in the order of their slots."""
        return self.table.where(self.table.goes_on)

    @cached_property
    def ends(self) -> SegmentTable:
        """The pieces that end their sequences, rank after rank."""
        return self.table.where(~self.table.goes_on)

    @cached_property
    def slot_counts(self) -> tuple[int, ...]:
        """Of each rank how many of its pieces go on elsewhere."""
        return tuple(self.slots.rank.bincount(minlength=self.layout.size).tolist())

    @cached_property
    def end_counts(self) -> tuple[int, ...]:
        """Of each rank how many of its pieces end their sequences."""
        return tuple(self.ends.rank.bincount(minlength=self.layout.size).tolist())

    @cached_property
    def tail_counts(self) -> tuple[int, ...]:
        """Of each rank how many of its tokens a convolution elsewhere looks back to."""
        counts = torch.zeros(self.layout.size, dtype=torch.int64)
        return tuple(counts.index_add_(0, self.slots.rank, self._tail_lengths).tolist())

    @property
    def num_slots(self) -> int:
        """Pieces of all ranks that go on elsewhere."""
        return len(self.slots.start)

    def of_rank(self, rank: int) -> SegmentTable:
        """The pieces of `rank`, as they lie there."""
        first = self._first_piece[rank]
        return SegmentTable(*(column[first : self._first_piece[rank + 1]] for column in self.table))

    def offsets_of(self, rank: int) -> PackOffsets:
        """Offsets of the pieces of `rank` in its tensor; the same object each time."""
        known: dict[int, PackOffsets] = self.__dict__.setdefault("_offsets", {})
        if rank not in known:
            own = self.of_rank(rank)
            lengths = (own.stop - own.start).tolist()
            known[rank] = PackOffsets.of([*accumulate(lengths, initial=0)])
        return known[rank]

    def own_slots(self, rank: int) -> Tensor:
        """Which pieces of `rank` go on elsewhere, by their places there."""
        return self.of_rank(rank).goes_on.nonzero().flatten()

    def own_ends(self, rank: int) -> Tensor:
        """Which pieces of `rank` end their sequences, by their places there."""
        return (~self.of_rank(rank).goes_on).nonzero().flatten()

    def end_rows(self, *, is_continued: bool) -> Tensor:
        """`[N]`: for each sequence its last piece, as a row of what a gather of ends delivers.

        An empty sequence has the row after the last; with `is_continued` its own one behind that,
        among those of all sequences.
        """
        num_sequences, num_ends = len(self.cu_seqlens) - 1, len(self.ends.start)
        rows_N = torch.full((num_sequences,), num_ends)
        if is_continued:
            rows_N += torch.arange(num_sequences)
        rows_N[self.ends.sequence] = torch.arange(num_ends)
        return rows_N

    def num_before(self, rank: int) -> Tensor:
        """`[F]`: for each piece of `rank`, how many of its sequence come before it."""
        first, last = self._spans_of(rank)
        return last - first

    def slot_before(self, rank: int, depth: int) -> Tensor:
        """For the pieces of `rank` with more than `depth` before them, the slot of that one.

        The earliest piece of the sequence has depth 0.
        """
        first, last = self._spans_of(rank)
        return self._by_start[(first + depth)[last - first > depth]]

    def tail_rows(self, rank: int) -> Tensor:
        """The tokens of `rank` that others look back to, by their rows there."""
        mine = self.slots.rank == rank
        slots, lengths = self.slots.where(mine), self._tail_lengths[mine]
        return expand_ranges(slots.row + slots.stop - slots.start - lengths, lengths)

    def halo_rows(self, rank: int, *, is_continued: bool) -> Tensor:
        """`[F, P]`: the tokens before each piece of `rank`, as rows of the gathered tails.

        A token before the start of the sequence is the row after the last; with `is_continued` its
        own one behind that, where the P tokens before each sequence follow, in their order.
        """
        pieces = self.of_rank(rank)
        gathered = expand_ranges(self.slots.stop - self._tail_lengths, self._tail_lengths)
        by_token = gathered.argsort()
        token_FP = pieces.start[:, None] - self.reach + torch.arange(self.reach)
        is_outside_FP = token_FP < pieces.origin[:, None]
        rows_FP = torch.full_like(token_FP, len(gathered))
        if is_continued:
            first_F = (pieces.sequence + 1) * self.reach - pieces.origin
            rows_FP += token_FP + first_F[:, None]
        inside = token_FP[~is_outside_FP]
        rows_FP[~is_outside_FP] = by_token[torch.searchsorted(gathered[by_token], inside)]
        return rows_FP

    @cached_property
    def _tail_lengths(self) -> Tensor:
        """`[S]`: of each slot as many of its last tokens as a convolution can look back to."""
        return (self.slots.stop - self.slots.start).clamp(max=self.reach)

    @cached_property
    def _by_start(self) -> Tensor:
        """The slots in the order of the pack, and so of each sequence."""
        return self.slots.start.argsort()

    def _spans_of(self, rank: int) -> tuple[Tensor, Tensor]:
        first, last = self._span_before[:, self._first_piece[rank] : self._first_piece[rank + 1]]
        return first, last

    @cached_property
    def _first_piece(self) -> list[int]:
        """Of each rank the place of its first piece in the table; and how many there are."""
        counts = self.table.rank.bincount(minlength=self.layout.size)
        return [0, *counts.cumsum(0).tolist()]

    @cached_property
    def _span_before(self) -> Tensor:
        """`[2, F]` of all ranks: where the slots of a piece's sequence before it begin and end.

        In the order of `_by_start`.
        """
        starts = self.slots.start[self._by_start]
        return torch.searchsorted(starts, torch.stack([self.table.origin, self.table.start]))
