"""All-reduce without a barrier, and for larger tensors in one step or in two, and reduce-scatter.

The barrier-free ones store addends on the ranks that add them, which wait for the data. In the
others a block copies what the same block of each rank reads, and waits for these blocks alone.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import (
    get,
    get_sum,
    load,
    place_in_whole,
    put,
    put_all,
    store,
)
from pcomm.nvls.primitives.barrier import barrier
from pcomm.nvls.primitives.lamport import advance, clear_previous, payload_of, slot_of, summed

__all__ = [
    "lamport_all_reduce_kernel",
    "lamport_reduce_scatter_kernel",
    "one_shot_all_reduce_kernel",
    "reduce_scatter_kernel",
    "two_shot_all_reduce_kernel",
]


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
        WAY: "multicast", "fenced multicast" or "peers".
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
        WAY: "multicast", "fenced multicast" or "peers".
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


@triton.jit(do_not_specialize=["num_vectors", "rank"])  # type: ignore[untyped-decorator]
def lamport_all_reduce_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
    buffers: tl.tensor,
    multicast: tl.tensor,
    state: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    region: tl.tensor,
    slot_bytes: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum in rank order in fp32, rounded once: the same bits on all ranks and in every run.

    Args:
        x: Address of this rank's input.
        out: Address of the result; may be `x`.
        num_vectors: Length of the input, in 16 bytes; at least 1.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        state: Address of the three words that count the operations of this rank.
        epochs: Words of this rank, the first of which is that of a failure.
        failure: Address of a word for the host: place of the missing rank, plus 1.
        region: Byte offset of the three slots in a buffer.
        slot_bytes: Size of a slot, in bytes.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        WAY: "multicast" or "peers": how inputs are stored. They are never added in the switch.
        KIND: "bf16", "fp16" or "fp32".
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    number = tl.load(state)
    slot = slot_of(number, region, slot_bytes)
    for start in range(block * BLOCK, num_vectors, step):
        index = start + lanes
        inside = index < num_vectors
        w0, w1, w2, w3 = load(x + index.to(tl.int64) * 16, inside)
        w0, w1, w2, w3 = payload_of(w0, w1, w2, w3)
        place = slot + (rank * num_vectors + index).to(tl.int64) * 16
        put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
    buffer = tl.load(buffers + rank)
    clear_previous(buffer, state, number, region, slot_bytes, BLOCK)
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        place = buffer + slot + index * 16
        w0, w1, w2, w3 = summed(
            place, num_vectors, inside, epochs, failure, limit_ns, WORLD, KIND, BLOCK
        )
        store(out + index * 16, w0, w1, w2, w3, inside)
    advance(state, number, WORLD * num_vectors)


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

    The slot has the order of `x`.

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
        WAY: "multicast", "fenced multicast" or "peers".
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


@triton.jit(do_not_specialize=["num_vectors", "row_vectors", "rank"])  # type: ignore[untyped-decorator]
def lamport_reduce_scatter_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
    buffers: tl.tensor,
    state: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    region: tl.tensor,
    slot_bytes: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
) -> None:
    """Sum of one segment in rank order in fp32, rounded once: the same bits in every run.

    A segment goes to one rank only, so there is nothing for a multicast to repeat.

    Args:
        x: Address of this rank's input, whose rows have a row of each segment side by side.
        out: Address of the result: segment `rank`; another one than `x`.
        num_vectors: Length of a segment, in 16 bytes; at least 1.
        row_vectors: Length of a row of a segment, in 16 bytes; `num_vectors` where segments follow
            each other.
        buffers: Table of the addresses of the ranks' buffers.
        state: Address of the three words that count the operations of this rank.
        epochs: Words of this rank, the first of which is that of a failure.
        failure: Address of a word for the host: place of the missing rank, plus 1.
        region: Byte offset of the three slots in a buffer.
        slot_bytes: Size of a slot, in bytes.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        KIND: "bf16", "fp16" or "fp32".
        BLOCK: Vectors of a segment that a block moves at a time: a multiple of its threads.
        PEERS: Number of segments that it stores at a time: a power of two.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK * PEERS)
    step = tl.num_programs(0) * BLOCK
    number = tl.load(state)
    slot = slot_of(number, region, slot_bytes)
    for start in range(block * BLOCK, num_vectors, step):
        index = start + wide % BLOCK
        row = index // row_vectors * (WORLD * row_vectors) + index % row_vectors
        place = slot + (rank * num_vectors + index).to(tl.int64) * 16
        for first in range(0, WORLD, PEERS):
            peer = first + wide // BLOCK
            inside = (index < num_vectors) & (peer < WORLD)
            line = (row + peer * row_vectors).to(tl.int64)
            w0, w1, w2, w3 = load(x + line * 16, inside)
            w0, w1, w2, w3 = payload_of(w0, w1, w2, w3)
            buffer = tl.load(buffers + peer, mask=inside, other=0)
            put(buffer + place, w0, w1, w2, w3, inside)
    own = tl.load(buffers + rank)
    clear_previous(own, state, number, region, slot_bytes, BLOCK)
    for start in range(block * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        place = own + slot + index * 16
        w0, w1, w2, w3 = summed(
            place, num_vectors, inside, epochs, failure, limit_ns, WORLD, KIND, BLOCK
        )
        store(out + index * 16, w0, w1, w2, w3, inside)
    advance(state, number, WORLD * num_vectors)
