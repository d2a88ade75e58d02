"""Which rows each rank has of a tensor whose rows are counted on the device."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = ["first_row", "rows_from"]


@triton.jit  # type: ignore[untyped-decorator]
def rows_from(
    counts: tl.tensor,
    peer: tl.tensor,
    first: tl.tensor,
    most_rows: tl.tensor,
    total_rows: tl.tensor,
) -> Any:
    """Rows of `peer`, which begin at row `first`.

    Numbers that are negative, above `most_rows`, or lead behind `total_rows` are cut off, on all
    ranks alike, so that no number on the device makes a kernel leave its memory.
    """
    count = tl.maximum(tl.load(counts + peer), 0)
    return tl.minimum(tl.minimum(count, most_rows), total_rows - first)


@triton.jit  # type: ignore[untyped-decorator]
def first_row(
    counts: tl.tensor,
    rank: tl.tensor,
    most_rows: tl.tensor,
    total_rows: tl.tensor,
    WORLD: tl.constexpr,
) -> Any:
    """Row at which those of `rank` begin: behind those of all ranks before it."""
    first = total_rows * 0
    for peer in range(WORLD):
        rows = rows_from(counts, peer, first, most_rows, total_rows)
        first += tl.where(peer < rank, rows, 0)
    return first
