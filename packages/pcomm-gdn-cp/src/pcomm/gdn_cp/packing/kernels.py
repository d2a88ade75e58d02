"""The Triton kernels that pack and unpack messages. Importing this file imports Triton.

A message is `[ranks * num_rows, MESSAGE_WIDTH]`, rank by rank. Each program moves one tile of one
section; the programs of all sections stand one after another in a one-dimensional grid, so that
there is one launch whatever the number of sections. Shapes of sections are constants of the
compilation: divisions become multiplications, and alignment is known, which makes accesses wide.
"""

# SHAPES of sections: OFFSET in a row of the message, WIDTH of the part or section, COPIES of each
# head, HEADS of a rank with copies counted, HEAD_WIDTH, ROWS and COLUMNS of a tile; and
# UNIT, elements of which the row stride of a part is a multiple.

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = ["pack_kernel", "unpack_kernel"]


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
