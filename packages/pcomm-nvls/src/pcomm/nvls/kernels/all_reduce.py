"""All-reduce of small tensors in one step, and of larger ones in two."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, get_sum, load, put, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["one_shot_all_reduce_kernel", "two_shot_all_reduce_kernel"]


@triton.jit(do_not_specialize=["num_vectors", "rank"])  # type: ignore[untyped-decorator]
def one_shot_all_reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
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
    """Each rank copies its tensor into its slot, and sums all slots after one barrier.

    Args:
        x: Address of this rank's tensor.
        out: Address of the sum; it may be `x`.
        num_vectors: Length of the tensor, in 16 bytes.
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
        IN_PLACE: True where the tensor is in the slot already; see `reduce_scatter_kernel`.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if not IN_PLACE:
        own = tl.load(buffers + rank) + slot
        for start in range(block * BLOCK, num_vectors, step):
            index = (start + lanes).to(tl.int64)
            inside = index < num_vectors
            w0, w1, w2, w3 = load(x + index * 16, inside)
            put(own + index * 16, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        place = slot + index * 16
        w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
        store(out + index * 16, w0, w1, w2, w3, inside)


@triton.jit(do_not_specialize=["num_vectors", "rank"])  # type: ignore[untyped-decorator]
def two_shot_all_reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
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
    """Each rank sums its segment of all slots, stores the sum in all slots, and copies all out.

    A segment is a `WORLD`-th of the tensor, rounded up; the last ones are shorter or empty. Rank r
    alone reads and writes segment r between the barriers, so its sums replace what was summed.

    Args:
        x: Address of this rank's tensor.
        out: Address of the sum; it may be `x`.
        num_vectors: Length of the tensor, in 16 bytes.
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
        IN_PLACE: True where the tensor is in the slot already; see `reduce_scatter_kernel`.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    own = tl.load(buffers + rank) + slot
    segment_vectors = (num_vectors + WORLD - 1) // WORLD
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if not IN_PLACE:
        for segment in range(WORLD):
            for start in range(block * BLOCK, segment_vectors, step):
                within = start + lanes
                index = segment * segment_vectors + within.to(tl.int64)
                inside = (within < segment_vectors) & (index < num_vectors)
                w0, w1, w2, w3 = load(x + index * 16, inside)
                put(own + index * 16, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    for start in range(block * BLOCK, segment_vectors, step):
        within = start + lanes
        index = rank * segment_vectors + within.to(tl.int64)
        inside = (within < segment_vectors) & (index < num_vectors)
        place = slot + index * 16
        w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
        put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    for segment in range(WORLD):
        for start in range(block * BLOCK, segment_vectors, step):
            within = start + lanes
            index = segment * segment_vectors + within.to(tl.int64)
            inside = (within < segment_vectors) & (index < num_vectors)
            w0, w1, w2, w3 = get(own + index * 16, inside)
            store(out + index * 16, w0, w1, w2, w3, inside)
