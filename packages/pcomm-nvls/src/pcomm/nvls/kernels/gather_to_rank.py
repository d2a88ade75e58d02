"""Gather to one rank: each rank stores its shard there, and that rank copies all out."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, load, put, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["gather_to_rank_kernel"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_vectors", "row_vectors", "destination", "rank"]
)
def gather_to_rank_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
    destination: tl.tensor,
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

    Data go from each rank to `destination` alone, so multicast carries nothing but the signals.

    Args:
        x: Address of this rank's shard.
        out: Address of the result; used where `rank` is `destination`, and not without `COPY_OUT`.
        num_vectors: Length of a shard, in 16 bytes.
        row_vectors: Length of a row of a shard, in 16 bytes; `num_vectors` where shards follow
            each other.
        destination: Place of the rank that gets the result, the same on all ranks.
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
    there = tl.load(buffers + destination) + slot
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        w0, w1, w2, w3 = load(x + index * 16, inside)
        place = there + (rank.to(tl.int64) * num_vectors + index) * 16
        put(place, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if COPY_OUT:
        # No vector where this rank is not the destination.
        length = tl.where(rank == destination, num_vectors, 0)
        for peer in range(WORLD):
            for start in range(block * BLOCK, length, step):
                index = (start + lanes).to(tl.int64)
                inside = index < length
                w0, w1, w2, w3 = get(there + (peer * num_vectors + index) * 16, inside)
                row = index // row_vectors
                column = index % row_vectors
                to = (row * WORLD + peer) * row_vectors + column
                store(out + to * 16, w0, w1, w2, w3, inside)
