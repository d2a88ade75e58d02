"""All-gather of one tensor and of several, and gather to one rank: stores, a barrier, a copy out.

Each rank stores its shard on the ranks that receive it, and copies all out after the barrier. The
barrier-free all-gather waits for the data instead.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, load, place_in_whole, put, put_all, store
from pcomm.nvls.primitives.barrier import barrier
from pcomm.nvls.primitives.lamport import (
    advance,
    arrived,
    clear_previous,
    joined,
    looked_at,
    payload_of,
    slot_of,
    spread,
)

__all__ = [
    "all_gather_coalesced_kernel",
    "all_gather_kernel",
    "gather_to_rank_kernel",
    "lamport_all_gather_kernel",
]


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
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        COPY_OUT: False where the result is read in the slot.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
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
                index = start + lanes
                inside = index < num_vectors
                place = own + (peer * num_vectors + index.to(tl.int64)) * 16
                w0, w1, w2, w3 = get(place, inside)
                to = place_in_whole(index, peer, row_vectors, WORLD)
                store(out + to * 16, w0, w1, w2, w3, inside)


@triton.jit(do_not_specialize=["num_vectors", "row_vectors", "rank"])  # type: ignore[untyped-decorator]
def lamport_all_gather_kernel(
    x: tl.tensor,
    out: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
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
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
) -> None:
    """Shards of `num_vectors` times 16 bytes, each row of `row_vectors` side by side in `out`.

    Args:
        x: Address of this rank's shard.
        out: Address of the result; another one than `x`.
        num_vectors: Length of a shard, in 16 bytes; at least 1.
        row_vectors: Length of a row of a shard, in 16 bytes; `num_vectors` where shards follow
            each other.
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
        WAY: "multicast" or "peers".
        SPREAD: True for bytes of any meaning; False for bf16, fp16 and fp32.
        BLOCK: Vectors of a shard that a block moves at a time: a multiple of its threads.
        PEERS: Number of shards that it reads at a time: a power of two.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    number = tl.load(state)
    slot = slot_of(number, region, slot_bytes)
    lines: tl.constexpr = 2 if SPREAD else 1
    for start in range(block * BLOCK, num_vectors, step):
        index = start + lanes
        inside = index < num_vectors
        w0, w1, w2, w3 = load(x + index.to(tl.int64) * 16, inside)
        place = slot + (rank * num_vectors + index).to(tl.int64) * (16 * lines)
        if SPREAD:
            s0, s1, s2, s3 = spread(w0, w1)
            put_all(buffers, multicast, place, s0, s1, s2, s3, inside, WORLD, WAY)
            place += 16
            w0, w1, w2, w3 = spread(w2, w3)
        else:
            w0, w1, w2, w3 = payload_of(w0, w1, w2, w3)
        put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
    buffer = tl.load(buffers + rank)
    clear_previous(buffer, state, number, region, slot_bytes, BLOCK)
    # A block reads the same vectors of every shard as it stored of its own, so it waits for the
    # same block of the other ranks only.
    wide = tl.arange(0, BLOCK * PEERS)
    for start in range(block * BLOCK, num_vectors, step):
        index = start + wide % BLOCK
        to = index // row_vectors * (WORLD * row_vectors) + index % row_vectors
        for first in range(0, WORLD, PEERS):
            peer = first + wide // BLOCK
            inside = (index < num_vectors) & (peer < WORLD)
            place = buffer + slot + (peer * num_vectors + index).to(tl.int64) * (16 * lines)
            w0, w1, w2, w3 = looked_at(place, inside)
            if SPREAD:
                s0, s1, s2, s3 = looked_at(place + 16, inside)
                w0, w1, w2, w3 = arrived(
                    place, w0, w1, w2, w3, peer, inside, epochs, failure, limit_ns
                )
                s0, s1, s2, s3 = arrived(
                    place + 16, s0, s1, s2, s3, peer, inside, epochs, failure, limit_ns
                )
                w0, w1 = joined(w0, w1, w2, w3)
                w2, w3 = joined(s0, s1, s2, s3)
            else:
                w0, w1, w2, w3 = arrived(
                    place, w0, w1, w2, w3, peer, inside, epochs, failure, limit_ns
                )
            line = (to + peer * row_vectors).to(tl.int64)
            store(out + line * 16, w0, w1, w2, w3, inside)
    advance(state, number, WORLD * num_vectors * lines)


# Not a tuple: Triton would compile anew for a length of 1, and for each multiple of 16 in it.
_LENGTHS = [f"n{i}" for i in range(8)]


@triton.jit(do_not_specialize=[*_LENGTHS, "rank"])  # type: ignore[untyped-decorator]
def all_gather_coalesced_kernel(  # noqa: D417
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    x4: tl.tensor,
    x5: tl.tensor,
    x6: tl.tensor,
    x7: tl.tensor,
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    out3: tl.tensor,
    out4: tl.tensor,
    out5: tl.tensor,
    out6: tl.tensor,
    out7: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    n3: tl.tensor,
    n4: tl.tensor,
    n5: tl.tensor,
    n6: tl.tensor,
    n7: tl.tensor,
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    TENSORS: tl.constexpr,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All-gathers as `all_gather_kernel` does them, one tensor after the other in the slot.

    The tensors begin with different blocks, so that small ones are not all done by the first.

    Args:
        x0, x1, x2, x3, x4, x5, x6, x7: Addresses of this rank's shards; any where there is none.
        out0, out1, out2, out3, out4, out5, out6, out7: Addresses of the results.
        n0, n1, n2, n3, n4, n5, n6, n7: Length of each shard, in 16 bytes.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: Numbers of the barriers of this rank; see `barrier`.
        failure: Address of the word that tells the host of a failure; see `barrier`.
        slot: Byte offset of the slot in a buffer; the signals are at offset 0.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        TENSORS: Number of shards.
        WORLD: Number of ranks.
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        BLOCK: Vectors that a block moves at a time: a multiple of its threads.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    step = blocks * BLOCK
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    xs = (x0, x1, x2, x3, x4, x5, x6, x7)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    num_vectors = (n0, n1, n2, n3, n4, n5, n6, n7)
    segment = slot.to(tl.int64)
    for i in tl.static_range(TENSORS):
        for start in range((block + i) % blocks * BLOCK, num_vectors[i], step):
            index = (start + lanes).to(tl.int64)
            inside = index < num_vectors[i]
            w0, w1, w2, w3 = load(xs[i] + index * 16, inside)
            place = segment + (rank.to(tl.int64) * num_vectors[i] + index) * 16
            put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
        segment += num_vectors[i].to(tl.int64) * (WORLD * 16)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    segment = tl.load(buffers + rank) + slot
    for i in tl.static_range(TENSORS):
        for peer in range(WORLD):
            for start in range((block + i) % blocks * BLOCK, num_vectors[i], step):
                index = (start + lanes).to(tl.int64)
                inside = index < num_vectors[i]
                place = (peer * num_vectors[i] + index) * 16
                w0, w1, w2, w3 = get(segment + place, inside)
                store(outs[i] + place, w0, w1, w2, w3, inside)
        segment += num_vectors[i].to(tl.int64) * (WORLD * 16)


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
    BLOCK: tl.constexpr,
) -> None:
    """Shards of `num_vectors` times 16 bytes, each row of `row_vectors` side by side in `out`.

    Data go from each rank to `destination` alone, so multicast carries nothing but the signals.

    Args:
        x: Address of this rank's shard.
        out: Address of the result; used where `rank` is `destination`.
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
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
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
    # No vector where this rank is not the destination.
    length = tl.where(rank == destination, num_vectors, 0)
    for peer in range(WORLD):
        for start in range(block * BLOCK, length, step):
            index = start + lanes
            inside = index < length
            w0, w1, w2, w3 = get(there + (peer * num_vectors + index.to(tl.int64)) * 16, inside)
            to = place_in_whole(index, peer, row_vectors, WORLD)
            store(out + to * 16, w0, w1, w2, w3, inside)
