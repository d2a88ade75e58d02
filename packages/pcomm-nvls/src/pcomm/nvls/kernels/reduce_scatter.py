"""Reduce-scatter: each rank copies its tensor into its slot, and sums its segment of all slots."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.segments import place_in_whole
from pcomm.nvls.primitives.access import get_sum, load, put, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["reduce_scatter_kernel"]


@triton.jit(do_not_specialize=["num_vectors", "row_vectors", "rank"])  # type: ignore[untyped-decorator]
def reduce_scatter_kernel(
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
    KIND: tl.constexpr,
    ENTRY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Segments of `num_vectors` times 16 bytes, whose rows stand side by side in `x`.

    A block copies the same vectors of every segment that it sums of its own segment, so it waits
    for the same block of the other ranks alone. The slot has the order of `x`.

    Args:
        x: Address of this rank's tensor: the segments of all ranks.
        out: Address of the sum of this rank's segment.
        num_vectors: Length of a segment, in 16 bytes.
        row_vectors: Length of a row of a segment, in 16 bytes; `num_vectors` where segments follow
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
        KIND: "bf16", "fp16" or "fp32".
        ENTRY: True where the operation before may have used the same slot.
        IN_PLACE: True where the tensor is in the slot already; `x` is not used. What wrote it came
            before this kernel in the stream, and did not start while a rank could read the slot.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if not IN_PLACE:
        own = tl.load(buffers + rank) + slot
        for segment in range(WORLD):
            for start in range(block * BLOCK, num_vectors, step):
                index = start + lanes
                inside = index < num_vectors
                place = place_in_whole(index, segment, row_vectors, WORLD) * 16
                w0, w1, w2, w3 = load(x + place, inside)
                put(own + place, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    for start in range(block * BLOCK, num_vectors, step):
        index = start + lanes
        inside = index < num_vectors
        place = slot + place_in_whole(index, rank, row_vectors, WORLD) * 16
        w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
        store(out + index.to(tl.int64) * 16, w0, w1, w2, w3, inside)
