"""Reduce-scatter of rows that are counted on the device: each rank gets the sum of its own."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.row_counts import first_row, rows_from
from pcomm.nvls.primitives.access import get_sum, load, put, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["reduce_scatter_v_kernel"]


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
        WAY: "multicast" or "peers".
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
