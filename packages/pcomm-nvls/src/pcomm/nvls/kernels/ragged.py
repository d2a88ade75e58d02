"""All-gather and reduce-scatter of rows that are counted on the device, for each rank apart.

The rows of a rank lie behind those of the rank before.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, get_sum, load, put, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_gather_v_kernel", "first_row", "reduce_scatter_v_kernel", "rows_from"]


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


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["most_rows", "total_rows", "row_vectors", "rank"]
)
def all_gather_v_kernel(
    x: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    most_rows: tl.tensor,
    total_rows: tl.tensor,
    row_vectors: tl.tensor,
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`counts[rank]` rows of this rank, all ranks' one after another in `out`.

    The grid does not depend on the counts, and a block without a row meets the others in the
    barrier. Rows of `out` behind the last one are left as they were.

    Args:
        x: Address of this rank's rows.
        out: Address of the result.
        counts: Rows of each rank, int32 on the device, the same on all ranks.
        most_rows: Most rows of a rank, the same number on all ranks; `x` has place for them, or
            for those that `counts` says.
        total_rows: Rows that `out` and the slot have place for, the same on all ranks; what does
            not fit is left out.
        row_vectors: Length of a row, in 16 bytes.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: Words of this rank alone; see `barrier`.
        failure: Address of the word of a failure; see `barrier`.
        slot: Byte offset of the slot in a buffer; the signals are at offset 0.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    first = first_row(counts, rank, most_rows, total_rows, WORLD)
    num_vectors = rows_from(counts, rank, first, most_rows, total_rows) * row_vectors
    begin = first.to(tl.int64) * row_vectors
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        w0, w1, w2, w3 = load(x + index * 16, inside)
        place = slot + (begin + index) * 16
        put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    own = tl.load(buffers + rank) + slot
    before = total_rows * 0
    # Shard by shard, so that a block reads what the same block of the other rank has stored.
    for peer in range(WORLD):
        peer_rows = rows_from(counts, peer, before, most_rows, total_rows)
        begin = before.to(tl.int64) * row_vectors
        for start in range(block * BLOCK, peer_rows * row_vectors, step):
            index = (start + lanes).to(tl.int64)
            inside = index < peer_rows * row_vectors
            place = (begin + index) * 16
            w0, w1, w2, w3 = get(own + place, inside)
            store(out + place, w0, w1, w2, w3, inside)
        before += peer_rows


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["most_rows", "total_rows", "row_vectors", "rank"]
)
def reduce_scatter_v_kernel(
    x: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    most_rows: tl.tensor,
    total_rows: tl.tensor,
    row_vectors: tl.tensor,
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    WAY: tl.constexpr,
    ENTRY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows of all ranks one after another in `x`, and of their sum `counts[rank]` in `out`.

    The grid does not depend on the counts, and a block without a row meets the others in the
    barrier. Rows of `out` behind the last one are left as they were.

    Args:
        x: Address of the rows for all ranks; not used with `IN_PLACE`.
        out: Address of this rank's rows of the sum.
        counts: Rows of each rank, int32 on the device, the same on all ranks.
        most_rows: Most rows of a rank, the same number on all ranks; `out` has place for them, or
            for those that `counts` says.
        total_rows: Rows that `x` and the slot have place for, the same on all ranks; those of a
            rank that begin behind are none.
        row_vectors: Length of a row, in 16 bytes.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: Words of this rank alone; see `barrier`.
        failure: Address of the word of a failure; see `barrier`.
        slot: Byte offset of the slot in a buffer; the signals are at offset 0.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        KIND: Numbers that are added: "bf16", "fp16" or "fp32".
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        IN_PLACE: True where the rows are in the slot already.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if not IN_PLACE:
        own = tl.load(buffers + rank) + slot
        before = total_rows * 0
        # Shard by shard, so that a block stores what the same block of the other rank will read.
        for peer in range(WORLD):
            peer_rows = rows_from(counts, peer, before, most_rows, total_rows)
            begin = before.to(tl.int64) * row_vectors
            for start in range(block * BLOCK, peer_rows * row_vectors, step):
                index = (start + lanes).to(tl.int64)
                inside = index < peer_rows * row_vectors
                place = (begin + index) * 16
                w0, w1, w2, w3 = load(x + place, inside)
                put(own + place, w0, w1, w2, w3, inside)
            before += peer_rows
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    first = first_row(counts, rank, most_rows, total_rows, WORLD)
    num_vectors = rows_from(counts, rank, first, most_rows, total_rows) * row_vectors
    begin = first.to(tl.int64) * row_vectors
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        place = slot + (begin + index) * 16
        w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
        store(out + index * 16, w0, w1, w2, w3, inside)
