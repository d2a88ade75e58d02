"""All-gather of several tensors of different sizes in one launch, with one barrier."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.segments import place_in_whole
from pcomm.nvls.primitives.access import get, load, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_gather_coalesced_kernel"]


@triton.jit(do_not_specialize=["num_vectors", "row_vectors", "rank"])  # type: ignore[untyped-decorator]
def all_gather_coalesced_kernel(
    xs: tl.tuple,
    outs: tl.tuple,
    num_vectors: tl.tuple,
    row_vectors: tl.tuple,
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
    """All-gathers as `all_gather_kernel` does them, one tensor after the other in the slot.

    The tensors begin with different blocks, so that small ones are not all done by the first.

    Args:
        xs: Addresses of this rank's shards.
        outs: Addresses of the results.
        num_vectors: Length of each shard, in 16 bytes.
        row_vectors: Length of a row of each shard, in 16 bytes; the shard's where shards follow
            each other.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: See `barrier`.
        failure: See `barrier`.
        slot: Byte offset of the slot in a buffer; the signals are at offset 0.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        WAY: "multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    step = blocks * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    segment = slot
    for i in tl.static_range(len(xs)):
        for start in range((block + i) % blocks * BLOCK, num_vectors[i], step):
            index = (start + lanes).to(tl.int64)
            inside = index < num_vectors[i]
            w0, w1, w2, w3 = load(xs[i] + index * 16, inside)
            place = segment + (rank.to(tl.int64) * num_vectors[i] + index) * 16
            put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
        segment += num_vectors[i].to(tl.int64) * (WORLD * 16)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    segment = tl.load(buffers + rank) + slot
    for i in tl.static_range(len(xs)):
        for peer in range(WORLD):
            for start in range((block + i) % blocks * BLOCK, num_vectors[i], step):
                index = start + lanes
                inside = index < num_vectors[i]
                place = segment + (peer * num_vectors[i].to(tl.int64) + index) * 16
                w0, w1, w2, w3 = get(place, inside)
                to = place_in_whole(index, peer, row_vectors[i], WORLD) * 16
                store(outs[i] + to, w0, w1, w2, w3, inside)
        segment += num_vectors[i].to(tl.int64) * (WORLD * 16)
