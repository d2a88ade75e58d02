"""Packing by Triton kernels: one launch for all sections. Importing this file imports Triton.

A launch is an object of plain arguments, so that the same launch can be compiled where there is
no GPU, and looked at.
"""

# t rows of this rank, T of all, R ranks, W columns of a rank in all sections, C of a section

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcomm.core.exchange.packing import ColumnShards
from pcomm.gdn_cp.packing.kernels import pack_kernel, unpack_kernel

__all__ = [
    "Columns",
    "Launch",
    "TritonPacking",
    "columns_of",
    "pack_launch",
    "side_by_side",
    "unpack_launch",
]

# 16 bytes, four times for each of 128 threads.
_TILE_BYTES, _ACCESS_BYTES = 8192, 16
_WIDE_TILES = (128, 256, 512)


class Columns(NamedTuple):
    """How the columns of one section lie in the message, with as many units for each rank."""

    offset: int
    width: int
    copies: int
    num_units: int
    unit: int


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments.

    Args:
        kernel: One of `kernels`.
        num_programs: Length of the one-dimensional grid.
        arguments: Arguments of the kernel, by name.
        device: Device of the tensors.
    """

    kernel: Any
    num_programs: int
    arguments: dict[str, Any]
    device: torch.device

    def run(self) -> None:
        """Enqueue it on the current stream of its device; nothing where there is nothing to do."""
        if not self.num_programs:
            return
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():
            self.kernel[(self.num_programs,)](**self.arguments)


class TritonPacking:
    """A `Packing` by one launch for all sections."""

    def pack_sections(
        self, sections_tC: Sequence[Tensor], shards: Sequence[ColumnShards]
    ) -> Tensor:
        """See `Packing`."""
        num_ranks = shards[0].num_ranks
        num_rows, width = len(sections_tC[0]), sum(shard.width_per_rank for shard in shards)
        message_TW = sections_tC[0].new_empty(num_ranks * num_rows, width)
        pack_launch(sections_tC, columns_of(shards), message_TW, None, num_ranks).run()
        return message_TW

    def take_rows(self, parts: Sequence[Tensor], order_T: Tensor | None) -> Tensor:
        """See `Packing`."""
        widths = [part.shape[1] for part in parts]
        rows_TW = parts[0].new_empty(len(parts[0]), sum(widths))
        pack_launch(parts, side_by_side(widths), rows_TW, order_T, 1).run()
        return rows_TW

    def unpack_sections(
        self, message_TW: Tensor, shards: Sequence[ColumnShards]
    ) -> tuple[Tensor, ...]:
        """See `Packing`."""
        num_rows = len(message_TW) // shards[0].num_ranks
        sections = tuple(message_TW.new_empty(num_rows, shard.width) for shard in shards)
        unpack_launch(message_TW, columns_of(shards), sections).run()
        return sections


def side_by_side(widths: Sequence[int]) -> list[Columns]:
    """Parts of these widths, of which a row of the message has all columns."""
    offsets = accumulate(widths, initial=0)
    return [Columns(o, width, 1, 1, width) for o, width in zip(offsets, widths, strict=False)]


def columns_of(shards: Sequence[ColumnShards]) -> list[Columns]:
    """The sections side by side; what needs no copies is as good as one unit for each rank."""
    columns = side_by_side([shard.width_per_rank for shard in shards])
    return [
        c._replace(copies=s.copies, num_units=s.units_per_rank, unit=s.unit) if s.copies > 1 else c
        for c, s in zip(columns, shards, strict=True)
    ]


def pack_launch(
    parts: Sequence[Tensor],
    columns: Sequence[Columns],
    message: Tensor,
    order: Tensor | None,
    num_ranks: int,
) -> Launch:
    """Rows of the parts into the message, for each rank the columns of its heads."""
    units = [_unit(part) for part in parts]
    row_units = [part.stride(0) // unit for part, unit in zip(parts, units, strict=True)]
    arguments = {
        "parts": tuple(parts),
        "row_units": tuple(row_units),
        "column_strides": tuple(part.stride(1) for part in parts),
        # Never read without an order; a pointer all the same, so that there is one signature.
        "order": message if order is None else order,
        "num_ranks": num_ranks,
        "HAS_ORDER": order is not None,
    }
    return _launch(pack_kernel, message, len(parts[0]), num_ranks, columns, units, arguments)


def unpack_launch(
    message: Tensor, columns: Sequence[Columns], sections: Sequence[Tensor]
) -> Launch:
    """Each head of the sections from where the message has it, copies added up."""
    pairs = zip(columns, sections, strict=True)
    wide = [column._replace(width=section.shape[1]) for column, section in pairs]
    arguments = {
        "sections": tuple(sections),
        "WIDEN": message.is_floating_point() and message.element_size() == 2,
    }
    num_rows, units = len(sections[0]), [1] * len(wide)
    return _launch(unpack_kernel, message.contiguous(), num_rows, 1, wide, units, arguments)


def _launch(
    kernel: Any,
    message: Tensor,
    num_rows: int,
    num_ranks: int,
    columns: Sequence[Columns],
    units: Sequence[int],
    arguments: dict[str, Any],
) -> Launch:
    """A program for each tile of each section, for each of `num_ranks`."""
    tiles = [_tile(column.width, message.element_size()) for column in columns]
    shapes = [(*c, *tile, unit) for c, tile, unit in zip(columns, tiles, units, strict=True)]
    num_tiles = sum(
        -(-num_rows // tile[0]) * -(-column.width // tile[1])
        for column, tile in zip(columns, tiles, strict=True)
    )
    shared = {
        "message": message,
        "num_rows": num_rows,
        "SHAPES": tuple(shapes),
        "MESSAGE_WIDTH": message.shape[1],
    }
    return Launch(kernel, num_ranks * num_tiles, arguments | shared, message.device)


def _tile(width: int, element_bytes: int) -> tuple[int, int]:
    """Rows and columns, powers of two: the fewest columns past the end, then the most."""
    columns = 1 << (width - 1).bit_length()
    if columns > _WIDE_TILES[0]:
        columns = min(_WIDE_TILES, key=lambda tile: (-(-width // tile) * tile, -tile))
    return _TILE_BYTES // element_bytes // columns, columns


def _unit(part: Tensor) -> int:
    """The widest access, in elements, that every row starts at a multiple of."""
    unit = _ACCESS_BYTES // part.element_size()
    while part.stride(0) % unit:
        unit //= 2
    return unit
