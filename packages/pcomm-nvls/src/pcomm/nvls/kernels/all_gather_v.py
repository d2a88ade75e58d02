"""All-gather of rows that are counted on the device, each rank's behind those of the one before."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.row_counts import first_row, rows_from
from pcomm.nvls.primitives.access import get, load, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_gather_v_kernel"]


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
    COPY_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`counts[rank]` rows of this rank, all ranks' one after another in `out`.

    The grid does not depend on the counts, and a block without a row meets the others in the
    barrier. Rows of `out` behind the last one are left as they were.

    Args:
        x: Address of this rank's rows.
        out: Address of the result; not used without `COPY_OUT`.
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
        WAY: "multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        COPY_OUT: False where the result is read in the slot.
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
    if COPY_OUT:
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
