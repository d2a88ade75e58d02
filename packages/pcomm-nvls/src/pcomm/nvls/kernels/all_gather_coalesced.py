"""All-gather of several tensors of different sizes in one launch, with one barrier."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, load, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_gather_coalesced_kernel"]

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
