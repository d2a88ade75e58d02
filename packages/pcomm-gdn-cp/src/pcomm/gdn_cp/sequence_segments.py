"""The segments of sequences that ranks hold, and their order in each sequence: integers only.

A segment is a range of one sequence on one rank. A segment that does not end its sequence has a
*slot*: its number among all such segments, rank after rank, which is the order in which a gather
delivers what belongs to them. There may be thousands, so nothing here loops over them.
"""

# R runs of all ranks, F segments (of all ranks, or of one), S slots, P tokens before a segment,
# N sequences

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core.exchange.positions import expand_ranges, layout_edges, run_ranks
from pcomm.core.layout import Layout
from pcomm.gdn_cp.pack_offsets import KeepsDerived, PackOffsets

__all__ = ["SequenceSegments"]


class SegmentTable(NamedTuple):
    """Segments, one a row; int64 and bool on the CPU.

    Args:
        start: First token, by its place in the pack.
        stop: The token after the last.
        sequence: Number of its sequence.
        origin: First token of that sequence.
        rank: Rank that holds it.
        row: First row in the tensor of its rank.
        goes_on: True if its sequence is continued after it.
    """

    start: Tensor
    stop: Tensor
    sequence: Tensor
    origin: Tensor
    rank: Tensor
    row: Tensor
    goes_on: Tensor

    def where(self, mask: Tensor) -> SegmentTable:
        """The segments that the mask selects."""
        return SegmentTable(*(column[mask] for column in self))


@dataclass(frozen=True)
class SequenceSegments(KeepsDerived):
    """All segments of all ranks.

    Args:
        cu_seqlens: Offsets of the sequences.
        layout: The tokens of each rank; each token lies on one rank.
        reach: Number of earlier tokens that a convolution takes: its width less one.
    """

    cu_seqlens: tuple[int, ...]
    layout: Layout
    reach: int

    @cached_property
    def table(self) -> SegmentTable:
        """Every segment, rank by rank, in the order of its tensor; none is empty."""
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
        """The segments that are continued on another rank, in the order of their slots."""
        return self.table.where(self.table.goes_on)

    @cached_property
    def ends(self) -> SegmentTable:
        """The segments that end their sequences, rank after rank."""
        return self.table.where(~self.table.goes_on)

    @cached_property
    def slot_counts(self) -> tuple[int, ...]:
        """Number of segments of each rank that are continued on another one."""
        return tuple(self.slots.rank.bincount(minlength=self.layout.size).tolist())

    @cached_property
    def end_counts(self) -> tuple[int, ...]:
        """Number of segments of each rank that end their sequences."""
        return tuple(self.ends.rank.bincount(minlength=self.layout.size).tolist())

    @cached_property
    def tail_counts(self) -> tuple[int, ...]:
        """Number of tokens of each rank that a convolution on another one takes."""
        counts = torch.zeros(self.layout.size, dtype=torch.int64)
        return tuple(counts.index_add_(0, self.slots.rank, self._tail_lengths).tolist())

    @property
    def num_slots(self) -> int:
        """Number of segments of all ranks that are continued on another one."""
        return len(self.slots.start)

    def of_rank(self, rank: int) -> SegmentTable:
        """The segments of `rank`, in the order of its tensor."""
        first = self._first_segment[rank]
        return SegmentTable(
            *(column[first : self._first_segment[rank + 1]] for column in self.table)
        )

    def offsets_of(self, rank: int) -> PackOffsets:
        """Offsets of the segments of `rank` in its tensor; the same object each time."""
        return self.derived(_offsets_of, rank)

    def own_slots(self, rank: int) -> Tensor:
        """The segments of `rank` that are continued on another one, by their places there."""
        return self.of_rank(rank).goes_on.nonzero().flatten()

    def own_ends(self, rank: int) -> Tensor:
        """The segments of `rank` that end their sequences, by their places there."""
        return (~self.of_rank(rank).goes_on).nonzero().flatten()

    def end_rows(self, is_continued: bool) -> Tensor:
        """`[N]`: for each sequence its last segment, as a row of what a gather of ends delivers.

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
        """`[F]`: for each segment of `rank`, the number of earlier ones of its sequence."""
        first, last = self._spans_of(rank)
        return last - first

    def slot_before(self, rank: int, depth: int) -> Tensor:
        """For the segments of `rank` with more than `depth` before them, the slot of that one.

        The earliest segment of the sequence has depth 0.
        """
        first, last = self._spans_of(rank)
        return self._by_start[(first + depth)[last - first > depth]]

    def tail_rows(self, rank: int) -> Tensor:
        """The tokens of `rank` that convolutions on other ranks take, by their rows there."""
        mine = self.slots.rank == rank
        slots, lengths = self.slots.where(mine), self._tail_lengths[mine]
        return expand_ranges(slots.row + slots.stop - slots.start - lengths, lengths)

    def halo_rows(self, rank: int, is_continued: bool) -> Tensor:
        """`[F, P]`: the tokens before each segment of `rank`, as rows of the gathered tails.

        A token before the start of the sequence is the row after the last; with `is_continued` its
        own one behind that, where the P tokens before each sequence follow, in their order.
        """
        segments = self.of_rank(rank)
        gathered = expand_ranges(self.slots.stop - self._tail_lengths, self._tail_lengths)
        by_token = gathered.argsort()
        token_FP = segments.start[:, None] - self.reach + torch.arange(self.reach)
        is_outside_FP = token_FP < segments.origin[:, None]
        rows_FP = torch.full_like(token_FP, len(gathered))
        if is_continued:
            first_F = (segments.sequence + 1) * self.reach - segments.origin
            rows_FP += token_FP + first_F[:, None]
        inside = token_FP[~is_outside_FP]
        rows_FP[~is_outside_FP] = by_token[torch.searchsorted(gathered[by_token], inside)]
        return rows_FP

    @cached_property
    def _tail_lengths(self) -> Tensor:
        """`[S]`: for each slot, the number of its last tokens that a convolution can take."""
        return (self.slots.stop - self.slots.start).clamp(max=self.reach)

    @cached_property
    def _by_start(self) -> Tensor:
        """The slots in the order of the pack, and so of each sequence."""
        return self.slots.start.argsort()

    def _spans_of(self, rank: int) -> tuple[Tensor, Tensor]:
        first, last = self._span_before[
            :, self._first_segment[rank] : self._first_segment[rank + 1]
        ]
        return first, last

    @cached_property
    def _first_segment(self) -> list[int]:
        """First row of each rank in the table, and the number of rows."""
        counts = self.table.rank.bincount(minlength=self.layout.size)
        return [0, *counts.cumsum(0).tolist()]

    @cached_property
    def _span_before(self) -> Tensor:
        """`[2, F]` of all ranks: where the slots of a segment's sequence before it begin and end.

        In the order of `_by_start`.
        """
        starts = self.slots.start[self._by_start]
        return torch.searchsorted(starts, torch.stack([self.table.origin, self.table.start]))


def _offsets_of(segments: SequenceSegments, rank: int) -> PackOffsets:
    own = segments.of_rank(rank)
    return PackOffsets.of([*accumulate((own.stop - own.start).tolist(), initial=0)])
