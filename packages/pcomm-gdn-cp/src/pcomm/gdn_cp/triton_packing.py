"""Messages packed by Triton: one launch for all sections. Importing this file imports Triton.

A message is `[ranks * num_rows, MESSAGE_WIDTH]`, rank by rank. Each program moves one tile of one
section; the programs of all sections stand one after another in a one-dimensional grid, so that
there is one launch whatever the number of sections. Shapes of sections are constants of the
compilation: divisions become multiplications, and alignment is known, which makes accesses wide.
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
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.exchange.fast import ColumnShards

__all__ = [
    "Columns",
    "TileLaunch",
    "TritonPacking",
    "columns_of",
    "pack_kernel",
    "pack_launch",
    "side_by_side",
    "unpack_kernel",
    "unpack_launch",
]


# 16 bytes, four times for each of 128 threads.
_TILE_BYTES, _ACCESS_BYTES = 8192, 16
_WIDE_TILES = (128, 256, 512)


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


class Columns(NamedTuple):
    """How the columns of one section lie in the message, with as many units for each rank."""

    offset: int
    width: int
    copies: int
    num_units: int
    unit: int


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


@dataclass(frozen=True)
class TileLaunch:
    """A kernel, its grid and its arguments.

    Args:
        kernel: One of the kernels below.
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


def pack_launch(
    parts: Sequence[Tensor],
    columns: Sequence[Columns],
    message: Tensor,
    order: Tensor | None,
    num_ranks: int,
) -> TileLaunch:
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
) -> TileLaunch:
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
) -> TileLaunch:
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
    return TileLaunch(kernel, num_ranks * num_tiles, arguments | shared, message.device)


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


# -- the kernels -----------------------------------------------------------------------------
#
# SHAPES of sections: OFFSET in a row of the message, WIDTH of the part or section, COPIES of each
# head, HEADS of a rank with copies counted, HEAD_WIDTH, ROWS and COLUMNS of a tile; and
# UNIT, elements of which the row stride of a part is a multiple.


@triton.jit  # type: ignore[untyped-decorator]
def pack_kernel(
    parts: tl.tuple,
    row_units: tl.tuple,
    column_strides: tl.tuple,
    message: tl.tensor,
    order: tl.tensor,
    num_rows: tl.tensor,
    num_ranks: tl.tensor,
    SHAPES: tl.constexpr,
    MESSAGE_WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
) -> None:
    """Row i for rank r is row i, or `order[i]`, of the parts: the columns of the heads of r."""
    program = tl.program_id(0)
    for n in tl.static_range(len(SHAPES)):
        row_tiles = (num_rows + SHAPES[n][5] - 1) // SHAPES[n][5]
        num_programs = num_ranks * row_tiles * ((SHAPES[n][1] + SHAPES[n][6] - 1) // SHAPES[n][6])
        if (program >= 0) & (program < num_programs):
            _pack_tile(
                program,
                parts[n],
                row_units[n],
                column_strides[n],
                message,
                order,
                num_rows,
                row_tiles,
                SHAPES,
                n,
                MESSAGE_WIDTH,
                HAS_ORDER,
            )
        program -= num_programs


@triton.jit  # type: ignore[untyped-decorator]
def _pack_tile(
    program: tl.tensor,
    part: tl.tensor,
    row_units: tl.tensor,
    column_stride: tl.tensor,
    message: tl.tensor,
    order: tl.tensor,
    num_rows: tl.tensor,
    row_tiles: tl.tensor,
    SHAPES: tl.constexpr,
    n: tl.constexpr,
    MESSAGE_WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
) -> None:
    OFFSET: tl.constexpr = SHAPES[n][0]
    WIDTH: tl.constexpr = SHAPES[n][1]
    COPIES: tl.constexpr = SHAPES[n][2]
    HEADS: tl.constexpr = SHAPES[n][3]
    HEAD_WIDTH: tl.constexpr = SHAPES[n][4]
    ROWS: tl.constexpr = SHAPES[n][5]
    COLUMNS: tl.constexpr = SHAPES[n][6]
    UNIT: tl.constexpr = SHAPES[n][7]
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    above = program // COLUMN_TILES
    rank = above // row_tiles
    rows = above % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = program % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    heads = (rank * HEADS + columns // HEAD_WIDTH) // COPIES
    from_columns = (heads * HEAD_WIDTH + columns % HEAD_WIDTH).to(tl.int64)
    if HAS_ORDER:
        from_rows = tl.load(order + rows, mask=rows < num_rows, other=0)
    else:
        from_rows = rows.to(tl.int64)
    start = part + (from_rows * row_units * UNIT)[:, None]
    values = tl.load(start + (from_columns * column_stride)[None, :], mask=inside)
    to_rows = rank.to(tl.int64) * num_rows + rows
    place = message + (to_rows * MESSAGE_WIDTH)[:, None] + (OFFSET + columns)[None, :]
    tl.store(place, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_kernel(
    message: tl.tensor,
    sections: tl.tuple,
    num_rows: tl.tensor,
    SHAPES: tl.constexpr,
    MESSAGE_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Each head of the sections is the sum of its copies, in the order of the ranks."""
    program = tl.program_id(0)
    for n in tl.static_range(len(SHAPES)):
        row_tiles = (num_rows + SHAPES[n][5] - 1) // SHAPES[n][5]
        num_programs = row_tiles * ((SHAPES[n][1] + SHAPES[n][6] - 1) // SHAPES[n][6])
        if (program >= 0) & (program < num_programs):
            _unpack_tile(program, message, sections[n], num_rows, SHAPES, n, MESSAGE_WIDTH, WIDEN)
        program -= num_programs


@triton.jit  # type: ignore[untyped-decorator]
def _unpack_tile(
    program: tl.tensor,
    message: tl.tensor,
    section: tl.tensor,
    num_rows: tl.tensor,
    SHAPES: tl.constexpr,
    n: tl.constexpr,
    MESSAGE_WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    OFFSET: tl.constexpr = SHAPES[n][0]
    WIDTH: tl.constexpr = SHAPES[n][1]
    COPIES: tl.constexpr = SHAPES[n][2]
    HEADS: tl.constexpr = SHAPES[n][3]
    HEAD_WIDTH: tl.constexpr = SHAPES[n][4]
    ROWS: tl.constexpr = SHAPES[n][5]
    COLUMNS: tl.constexpr = SHAPES[n][6]
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = program // COLUMN_TILES * ROWS + tl.arange(0, ROWS)
    columns = program % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    start = message + (rows.to(tl.int64) * MESSAGE_WIDTH)[:, None]
    for copy in tl.static_range(COPIES):
        heads = columns // HEAD_WIDTH * COPIES + copy
        ranks = (heads // HEADS).to(tl.int64)
        from_columns = OFFSET + heads % HEADS * HEAD_WIDTH + columns % HEAD_WIDTH
        skipped = ranks * num_rows * MESSAGE_WIDTH + from_columns
        values = tl.load(start + skipped[None, :], mask=inside)
        if WIDEN and COPIES > 1:
            values = values.to(tl.float32)
        # One after another, so the sum is the same each time.
        if copy == 0:
            total = values
        else:
            total += values
    place = section + (rows.to(tl.int64) * WIDTH)[:, None] + columns[None, :]
    tl.store(place, total.to(section.dtype.element_ty), mask=inside)
