"""Reduce-scatter without a barrier: each rank stores every segment on the rank that adds it."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import load, put, store
from pcomm.nvls.primitives.lamport import advance, clear_previous, payload_of, slot_of, summed

__all__ = ["lamport_reduce_scatter_kernel"]


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
