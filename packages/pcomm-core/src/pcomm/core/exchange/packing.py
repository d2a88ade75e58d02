"""How the sections of an exchange become one message, and a message sections; here by torch.

An exchange takes what packs as an argument. `TorchPacking` runs everywhere and is the reference for
kernels that do the same in one launch, such as those of pcomm-gdn-cp.
"""

# t rows of this rank, T of all, R ranks, W columns of a rank in all sections, C of a section

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pcomm.core.layout import Layout, Run

__all__ = ["ColumnShards", "Packing", "TorchPacking"]


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
