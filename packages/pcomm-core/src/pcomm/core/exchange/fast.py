"""The two fast algorithms of an exchange, whole rows and columns, and how shards are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.positions import (
    Permutation,
    RowOrder,
    expand_ranges,
    layout_edges,
    run_ranks,
)
from pcomm.core.layout import Layout, Run

__all__ = [
    "ColumnShards",
    "Packing",
    "RowMoves",
    "RowsAndColumns",
    "ToColumns",
    "ToRows",
    "TorchPacking",
]


# -- rows ----------------------------------------------------------------------------------
# R runs of one rank, S runs of all ranks, P pieces: what a run of one has in common with the other


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


# -- columns, and how they are packed ------------------------------------------------------
# t rows of this rank, T of all, R ranks, W columns of a rank in all sections, C of a section


@dataclass(frozen=True)
class ColumnShards:
    """How the columns of one section are dealt out to the ranks: equal numbers of whole units.

    Args:
        num_units: Number of units of the whole section.
        unit: Columns of a unit.
        copies: Number of times each unit is repeated before the ranks take equal shards.
        num_ranks: Number of ranks.
    """

    num_units: int
    unit: int
    copies: int
    num_ranks: int

    @cached_property
    def width(self) -> int:
        """Columns of the whole section, each counted once."""
        return self.num_units * self.unit

    @cached_property
    def units_per_rank(self) -> int:
        """Units of a rank, copies counted."""
        return self.num_units * self.copies // self.num_ranks

    @cached_property
    def width_per_rank(self) -> int:
        """Columns of a rank, copies counted."""
        return self.units_per_rank * self.unit

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all columns, once."""
        return (self.num_units, self.copies) == (1, self.num_ranks)

    @property
    def layout(self) -> Layout:
        """The layout that deals columns out like this."""
        layout = Layout.repeated(self.width, self.num_ranks, unit=self.unit, copies=self.copies)
        layout.adopt(ColumnShards.of, self)
        return layout

    def widened(self, factor: int) -> ColumnShards:
        """The same shards of columns that consist of `factor` columns each."""
        return ColumnShards(self.num_units, self.unit * factor, self.copies, self.num_ranks)

    @classmethod
    def of(cls, layout: Layout) -> ColumnShards | None:
        """The shards of an even or a repeated layout; None for any other. See `Layout.derived`."""
        width = layout.sizes[0]
        if not width or set(layout.sizes) != {width}:
            return None
        if layout.is_contiguous:
            # Without copies the columns of a rank lie side by side, as one unit.
            return cls(layout.size, width, 1, layout.size)
        runs = [run for own in layout.runs for run in own]
        unit, copies = runs[0].length, runs.count(runs[0])
        starts = [i // copies * unit for i in range(len(runs))]
        if runs != [Run(start, start + unit) for start in starts] or runs[-1].stop != layout.length:
            return None
        return cls(layout.length // unit, unit, copies, layout.size)


class Packing(Protocol):
    """How sections and rows become the message of an exchange, and the other way round.

    Local, and not differentiable: each method is the gradient of another one. Inputs may have any
    strides; results are new tensors.
    """

    def pack_sections(
        self, sections_tC: Sequence[Tensor], shards: Sequence[ColumnShards]
    ) -> Tensor:
        """`[R * t, W]`: for each rank in turn its columns of all sections, section by section.

        Args:
            sections_tC: Tensors `[t, C]` of one dtype and device.
            shards: Column shards of each section.
        """
        ...

    def take_rows(self, parts: Sequence[Tensor], order_T: Tensor | None) -> Tensor:
        """`[T, W]`: the parts side by side; row i is row `order_T[i]` of each of them.

        Args:
            parts: Tensors `[T, columns]` of one dtype and device.
            order_T: `[T]`, int64, on the device of the parts; None for the rows as they are.
        """
        ...

    def unpack_sections(
        self, message_TW: Tensor, shards: Sequence[ColumnShards]
    ) -> tuple[Tensor, ...]:
        """`[t, C]` of each section, from the columns that every rank has sent.

        Copies of a column are added up, in fp32 where elements are shorter than that.

        Args:
            message_TW: `[R * t, W]`, as `pack_sections` makes it.
            shards: Column shards of each section.
        """
        ...


class TorchPacking:
    """Packing by torch: one strided copy or row gather for each section."""

    def pack_sections(
        self, sections_tC: Sequence[Tensor], shards: Sequence[ColumnShards]
    ) -> Tensor:
        """See `Packing`."""
        widths, num_ranks = [s.width_per_rank for s in shards], shards[0].num_ranks
        message_RtW = sections_tC[0].new_empty(num_ranks, len(sections_tC[0]), sum(widths))
        places = message_RtW.split(widths, -1)
        for place_RtW, section, shard in zip(places, sections_tC, shards, strict=True):
            if shard.copies > 1:
                units = section.unflatten(-1, (shard.num_units, shard.unit))
                section = units.repeat_interleave(shard.copies, 1).flatten(1)
            place_RtW.copy_(section.unflatten(-1, (num_ranks, -1)).transpose(0, 1))
        return message_RtW.flatten(0, 1)

    def take_rows(self, parts: Sequence[Tensor], order_T: Tensor | None) -> Tensor:
        """See `Packing`."""
        if order_T is None:
            return torch.cat(list(parts), -1)
        if len(parts) == 1:
            return parts[0].index_select(0, order_T)
        widths = [part.shape[1] for part in parts]
        rows_TW = parts[0].new_empty(len(order_T), sum(widths))
        for place, part in zip(rows_TW.split(widths, -1), parts, strict=True):
            torch.index_select(part, 0, order_T, out=place)
        return rows_TW

    def unpack_sections(
        self, message_TW: Tensor, shards: Sequence[ColumnShards]
    ) -> tuple[Tensor, ...]:
        """See `Packing`."""
        num_ranks = shards[0].num_ranks
        message_RtW = message_TW.unflatten(0, (num_ranks, len(message_TW) // num_ranks))
        ends = accumulate(shard.width_per_rank for shard in shards)
        sections = []
        for shard, end in zip(shards, ends, strict=True):
            part_RtW = message_RtW[:, :, end - shard.width_per_rank : end]
            section = part_RtW.transpose(0, 1).flatten(1)
            if shard.copies > 1:
                split = (shard.num_units, shard.copies, shard.unit)
                section = section.unflatten(-1, split).sum(2).flatten(1)
            sections.append(section)
        return tuple(sections)


# -- rows exchanged for columns ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowsAndColumns:
    """Which rows and columns each rank has.

    Args:
        rows: Layout of the rows, a partition.
        shards: Column shards of each section, at least one.
        fused: Number of first sections that are one tensor where a rank has all rows.
    """

    rows: Layout
    shards: tuple[ColumnShards, ...]
    fused: int

    @cached_property
    def is_gather(self) -> bool:
        """Whether every rank gets all columns."""
        return all(shard.is_whole for shard in self.shards)

    @cached_property
    def order(self) -> RowOrder:
        """The order in which rows arrive, shared by all exchanges of these rows."""
        return self.rows.derived(RowOrder.of)

    @cached_property
    def row_sizes(self) -> tuple[int, ...] | None:
        """Rows of each rank; None where all have the same number."""
        sizes = self.rows.sizes
        return None if len(set(sizes)) == 1 else sizes

    def equal_sizes(self, num_rows: int) -> tuple[int, ...] | None:
        """As many rows for each rank, said only where the other side is uneven."""
        return None if self.row_sizes is None else (num_rows,) * self.rows.size

    @cached_property
    def widths(self) -> list[int]:
        """Columns of each section."""
        return [shard.width for shard in self.shards]

    @cached_property
    def rank_widths(self) -> list[int]:
        """Columns of a rank in each tensor."""
        widths = [shard.width_per_rank for shard in self.shards]
        return [sum(widths[: self.fused]), *widths[self.fused :]]

    def widened(self, widths: list[int], found: list[int]) -> RowsAndColumns:
        """The same for tensors of other widths, into which further dimensions were flattened."""
        if found == widths:
            return self
        factors = [new // old for new, old in zip(found, widths, strict=True)]
        shards = tuple(s.widened(f) for s, f in zip(self.shards, factors, strict=True))
        return RowsAndColumns(self.rows, shards, self.fused)


@dataclass(frozen=True, eq=False)
class ToColumns:
    """From `[t, all columns]` of each section to `[T, W]`, of which the results are views."""

    plan: RowsAndColumns
    is_flat: ClassVar[bool] = True

    @property
    def adjoint(self) -> ToRows:
        """The algorithm of the gradients."""
        return ToRows(self.plan)

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        """All rows of my columns. Collective: one all-to-all, or one all-gather."""
        first = tensors[0]
        plan = self.plan.widened(self.plan.widths, [x.shape[1] for x in tensors])
        if plan.is_gather:
            mine_tW = first if len(tensors) == 1 else packing.take_rows(tensors, None)
            received_TW = collectives.all_gather(mine_tW, sizes=plan.row_sizes)
        else:
            received_TW = collectives.all_to_all(
                packing.pack_sections(tensors, plan.shards),
                send_sizes=plan.equal_sizes(len(first)),
                receive_sizes=plan.row_sizes,
            )
        order = plan.order.on(first.device)
        if order is not None:
            received_TW = packing.take_rows([received_TW], order.back)
        # Split here, so that the gradients of the parts come apart and need not be put together.
        widths = plan.rank_widths
        return tuple(received_TW.split(widths, -1)) if len(widths) > 1 else (received_TW,)


@dataclass(frozen=True, eq=False)
class ToRows:
    """From all rows of my columns to `[t, all columns]` of each section; copies are added up."""

    plan: RowsAndColumns
    is_flat: ClassVar[bool] = True

    @property
    def adjoint(self) -> ToColumns:
        """The algorithm of the gradients."""
        return ToColumns(self.plan)

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        """All columns of my rows. Collective: one all-to-all, or one reduce-scatter."""
        plan = self.plan.widened(self.plan.rank_widths, [x.shape[1] for x in tensors])
        order = plan.order.on(tensors[0].device)
        if order is None and len(tensors) == 1:
            message_TW = tensors[0]
        else:
            message_TW = packing.take_rows(tensors, None if order is None else order.forth)
        if plan.is_gather:
            summed_tW = collectives.reduce_scatter(message_TW, sizes=plan.row_sizes)
            return tuple(summed_tW.split(plan.widths, -1))
        received_TW = collectives.all_to_all(
            message_TW,
            send_sizes=plan.row_sizes,
            receive_sizes=plan.equal_sizes(plan.rows.sizes[collectives.rank]),
        )
        return packing.unpack_sections(received_TW, plan.shards)
