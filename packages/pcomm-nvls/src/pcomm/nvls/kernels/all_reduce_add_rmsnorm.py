"""All-reduce, residual and norm in one kernel: every rank has the residual and gets all rows."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.rms_norm import add_residual, rms_norm
from pcomm.nvls.primitives.access import get, get_sum, load, put, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["all_reduce_add_rmsnorm_kernel"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "row_vectors", "inverse_hidden", "eps", "rank"]
)
def all_reduce_add_rmsnorm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    new_residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    row_vectors: tl.tensor,
    inverse_hidden: tl.tensor,
    eps: tl.tensor,
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    WAY: tl.constexpr,
    ENTRY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows of `row_vectors` times 16 bytes; block b has every row b, b + blocks, and so on.

    Args:
        x: Address of this rank's addends; not used with `IN_PLACE`.
        residual: Address of the residual, the same on all ranks.
        weight: Address of the weight of the norm: one row.
        new_residual: Address of the sum of all addends and the residual; may be `residual`.
        out: Address of the normed rows; may be `x`.
        num_rows: Number of rows.
        row_vectors: Length of a row, in 16 bytes; at most `BLOCK`.
        inverse_hidden: 1 over the length of a row, in numbers.
        eps: Number that is added to the mean square.
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers, or 0.
        epochs: Words of this rank alone; see `barrier`.
        failure: Address of the word of a failure; see `barrier`.
        slot: Byte offset of the slot in a buffer; the signals are at offset 0.
        limit_ns: Longest wait for a rank.
        rank: Place of this rank.
        WORLD: Number of ranks.
        KIND: Numbers of all tensors: "bf16", "fp16" or "fp32".
        WAY: "multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        IN_PLACE: True where the addends are in the slot already.
        TWO_SHOT: True to have each row added by one rank, which gives it to the others; without,
            each rank adds all rows.
        BLOCK: Vectors of a row that a block has place for: a power of two, a multiple of its
            threads.
    """
    block = tl.program_id(0)
    step = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < row_vectors
    at_lane = lanes.to(tl.int64) * 16
    row_bytes = row_vectors.to(tl.int64) * 16
    own = tl.load(buffers + rank) + slot
    if ENTRY:
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if not IN_PLACE:
        for row in range(block, num_rows, step):
            place = row * row_bytes + at_lane
            w0, w1, w2, w3 = load(x + place, inside)
            put(own + place, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if TWO_SHOT:
        for row in range(block + rank * step, num_rows, step * WORLD):
            place = slot + row * row_bytes + at_lane
            w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
            put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
        barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    v0, v1, v2, v3 = load(weight + at_lane, inside)
    for row in range(block, num_rows, step):
        place = row * row_bytes + at_lane
        if TWO_SHOT:
            w0, w1, w2, w3 = get(own + place, inside)
        else:
            w0, w1, w2, w3 = get_sum(
                buffers, multicast, slot + place, inside, WORLD, KIND, WAY, BLOCK
            )
        r0, r1, r2, r3 = load(residual + place, inside)
        r0, r1, r2, r3 = add_residual(w0, w1, w2, w3, r0, r1, r2, r3, KIND)
        store(new_residual + place, r0, r1, r2, r3, inside)
        w0, w1, w2, w3 = rms_norm(r0, r1, r2, r3, v0, v1, v2, v3, inverse_hidden, eps, KIND)
        store(out + place, w0, w1, w2, w3, inside)
