"""The fast way between rows and columns: my rows of all columns, all rows of my columns.

Every element is read and written once on either side of the message: packing copies the columns of
each rank, and one row permutation brings what arrives into the order of the whole. Backward goes
the other way round and adds up the copies of columns that several ranks have. A cover that gives
every rank everything is an all-gather, and backward a reduce-scatter.
"""

# t rows of this rank, T of all, R ranks, W columns of a rank in all sections

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.index import RowOrder
from pcomm.core.exchange.packing import ColumnShards, Packing
from pcomm.core.layout import Layout

__all__ = ["RowsAndColumns", "ToColumns", "ToRows"]


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
        """The way of the gradients."""
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
        """The way of the gradients."""
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
