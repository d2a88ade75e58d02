"""Where a vector of a segment lies in a tensor whose segments stand side by side in each row."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = ["place_in_whole"]


@triton.jit  # type: ignore[untyped-decorator]
def place_in_whole(
    index: tl.tensor, segment: tl.tensor, row_vectors: tl.tensor, WORLD: tl.constexpr
) -> tl.tensor:
    """Places (int64) of the vectors `index` (int32) of a segment, in units of 16 bytes.

    A row of the whole has `row_vectors` of each of the `WORLD` segments. Where a row is all of a
    segment, so there is one row, the segments follow each other.
    """
    row = (index // row_vectors).to(tl.int64)
    return (row * WORLD + segment) * row_vectors + index % row_vectors
