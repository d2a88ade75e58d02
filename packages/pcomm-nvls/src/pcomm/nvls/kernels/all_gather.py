"""All-gather: each rank stores its shard on all ranks, and copies all out after a barrier."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, load, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_gather_kernel"]


@triton.jit(do_not_specialize=["num_vectors", "row_vectors", "rank"])  # type: ignore[untyped-decorator]
def all_gather_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
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
    """Shards of `num_vectors` times 16 bytes, each row of `row_vectors` side by side in `out`.

    Args:
        x: Address of this rank's shard.
        out: Address of the result; not used without `COPY_OUT`.
        num_vectors: Length of a shard, in 16 bytes.
        row_vectors: Length of a row of a shard, in 16 bytes; `num_vectors` where shards follow
            each other.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: Numbers of the barriers of this rank; see `barrier`.
        failure: Address of the word that tells the host of a failure; see `barrier`.
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
        barrier(
            buffers,
            multicast,
            epochs,
            failure,
            0,
            limit_ns,
            rank,
            block,
            WORLD,
            WAY,
        )
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        w0, w1, w2, w3 = load(x + index * 16, inside)
        place = slot + (rank.to(tl.int64) * num_vectors + index) * 16
        put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if COPY_OUT:
        own = tl.load(buffers + rank) + slot
        for peer in range(WORLD):
            for start in range(block * BLOCK, num_vectors, step):
                index = (start + lanes).to(tl.int64)
                inside = index < num_vectors
                place = own + (peer * num_vectors + index) * 16
                w0, w1, w2, w3 = get(place, inside)
                row = index // row_vectors
                column = index % row_vectors
                to = (row * WORLD + peer) * row_vectors + column
                store(out + to * 16, w0, w1, w2, w3, inside)
