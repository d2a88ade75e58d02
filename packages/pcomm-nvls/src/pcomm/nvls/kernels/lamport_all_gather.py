"""All-gather without a barrier: each rank stores its shard on all ranks, where it shows itself."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import load, put_all, store
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

__all__ = ["lamport_all_gather_kernel"]


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
