"""All-reduce without a barrier: each rank stores its input on all ranks, and each adds them all."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import load, put_all, store
from pcomm.nvls.primitives.lamport import advance, clear_previous, payload_of, slot_of, summed

__all__ = ["lamport_all_reduce_kernel"]


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
