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
        shards: How the columns of each section are dealt out, at least one section.
        fused: How many of the first sections are one tensor where a rank has all rows.
    """

    rows: Layout
    shards: tuple[ColumnShards, ...]
    fused: int

    @property
    def is_gather(self) -> bool:
        """Whether every rank gets all columns."""
        return all(shard.is_whole for shard in self.shards)

    @property
    def order(self) -> RowOrder:
        """The order in which rows arrive, shared by all exchanges of these rows."""
        return self.rows.derived(RowOrder)

    @property
    def row_sizes(self) -> tuple[int, ...] | None:
        """Rows of each rank; None where all have the same number."""
        sizes = self.rows.sizes
        return None if len(set(sizes)) == 1 else sizes

    def equal_sizes(self, num_rows: int) -> tuple[int, ...] | None:
        """As many rows for each rank, said only where the other side is uneven."""
        return None if self.row_sizes is None else (num_rows,) * self.rows.size

    def widened(self, widths: Sequence[int]) -> tuple[ColumnShards, ...]:
        """The shards of sections with so many columns, further dimensions flattened into them."""
        pairs = zip(self.shards, widths, strict=True)
        return tuple(s if w == s.width else s.widened(w // s.width) for s, w in pairs)

    def widened_to(self, widths: Sequence[int]) -> tuple[ColumnShards, ...]:
        """The same for the columns of a rank, of tensors of which the first may be fused."""
        if self.fused > 1:
            return self.shards
        pairs = zip(self.shards, widths, strict=True)
        return self.widened([s.width * w // s.width_per_rank for s, w in pairs])


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
        plan, first = self.plan, tensors[0]
        shards = plan.widened([x.shape[1] for x in tensors])
        if plan.is_gather:
            mine_tW = first if len(tensors) == 1 else packing.take_rows(tensors, None)
            received_TW = collectives.all_gather(mine_tW, sizes=plan.row_sizes)
        else:
            received_TW = collectives.all_to_all(
                packing.pack_sections(tensors, shards),
                send_sizes=plan.equal_sizes(len(first)),
                receive_sizes=plan.row_sizes,
            )
        order = plan.order.on(first.device)
        if order is not None:
            received_TW = packing.take_rows([received_TW], order.back)
        widths = [shard.width_per_rank for shard in shards]
        widths = [sum(widths[: plan.fused]), *widths[plan.fused :]]
        # Split here, so that the gradients of the parts come apart and need not be put together.
        return received_TW.split(widths, -1) if len(widths) > 1 else (received_TW,)


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
        plan, order = self.plan, self.plan.order.on(tensors[0].device)
        if order is None and len(tensors) == 1:
            message_TW = tensors[0]
        else:
            message_TW = packing.take_rows(tensors, None if order is None else order.forth)
        shards = plan.widened_to([x.shape[1] for x in tensors])
        if plan.is_gather:
            summed_tW = collectives.reduce_scatter(message_TW, sizes=plan.row_sizes)
            return summed_tW.split([shard.width for shard in shards], -1)
        received_TW = collectives.all_to_all(
            message_TW,
            send_sizes=plan.row_sizes,
            receive_sizes=plan.equal_sizes(plan.rows.sizes[collectives.rank]),
        )
        return packing.unpack_sections(received_TW, shards)
