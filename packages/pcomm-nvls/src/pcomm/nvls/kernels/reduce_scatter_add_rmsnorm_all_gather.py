"""Reduce-scatter, residual, norm and all-gather in one kernel, for a stream split by tokens."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.fp8_rows import fp8_words, row_scale
from pcomm.nvls.kernels.rms_norm import add_residual, rms_norm
from pcomm.nvls.primitives.access import get, get_sum, load, put, put_all, store
from pcomm.nvls.primitives.barrier import barrier

__all__ = ["reduce_scatter_add_rmsnorm_all_gather_kernel"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "row_vectors", "inverse_hidden", "eps", "rank"]
)
def reduce_scatter_add_rmsnorm_all_gather_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    new_residual: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
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
    COPY_OUT: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`num_rows` rows for each rank; block b has the rows b, b + blocks, ... of each of them.

    A rank adds its own rows, and stores the normed ones where the addends were: between the
    barriers it is the only one that reads these.

    Args:
        x: Address of the addends: the rows of all ranks, one rank's after the other's. Not used
            with `IN_PLACE`.
        residual: Address of this rank's rows of the residual.
        weight: Address of the weight of the norm: one row.
        new_residual: Address of this rank's rows of the sum of all addends and the residual; may
            be `residual`.
        out: Address of the normed rows of all ranks; may be `x`. Not used without `COPY_OUT`.
        scales: Address of fp32 scales: one for each row of `out` with `FP8` "rows", which are
            written; one for all with "given", which is read. Not used without `FP8`.
        num_rows: Rows of each rank.
        row_vectors: Length of a row of the addends, in 16 bytes; at most `BLOCK`.
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
        KIND: Numbers of all tensors but an fp8 `out`: "bf16", "fp16" or "fp32".
        WAY: "multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        IN_PLACE: True where the addends are in the slot already.
        COPY_OUT: False where the result is read in the slot; not with `FP8`.
        FP8: "no", or the normed rows as e4m3: "rows" with a scale for each, "given" with the one
            in `scales`. Numbers then have two bytes, and rows an even number of vectors.
        BLOCK: Vectors of a row that a block has place for: a power of two, a multiple of its
            threads, with `FP8` of twice its threads.
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
        for peer in range(WORLD):
            for row in range(block, num_rows, step):
                place = (peer * num_rows + row) * row_bytes + at_lane
                w0, w1, w2, w3 = load(x + place, inside)
                put(own + place, w0, w1, w2, w3, inside)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    v0, v1, v2, v3 = load(weight + at_lane, inside)
    for row in range(block, num_rows, step):
        start = slot + (rank * num_rows + row) * row_bytes
        place = start + at_lane
        w0, w1, w2, w3 = get_sum(buffers, multicast, place, inside, WORLD, KIND, WAY, BLOCK)
        here = row * row_bytes + at_lane
        r0, r1, r2, r3 = load(residual + here, inside)
        r0, r1, r2, r3 = add_residual(w0, w1, w2, w3, r0, r1, r2, r3, KIND)
        store(new_residual + here, r0, r1, r2, r3, inside)
        w0, w1, w2, w3 = rms_norm(r0, r1, r2, r3, v0, v1, v2, v3, inverse_hidden, eps, KIND)
        if FP8 == "no":
            put_all(buffers, multicast, place, w0, w1, w2, w3, inside, WORLD, WAY)
        else:
            scale = row_scale(w0, w1, w2, w3, KIND) if FP8 == "rows" else tl.load(scales)
            # Half as many bytes, and behind them a vector with the scale.
            half = tl.arange(0, BLOCK // 2)
            w0, w1, w2, w3 = fp8_words(w0, w1, w2, w3, scale, KIND, BLOCK)
            place = start + half.to(tl.int64) * 16
            put_all(buffers, multicast, place, w0, w1, w2, w3, half < row_vectors // 2, WORLD, WAY)
            if FP8 == "rows":
                bits = tl.full((BLOCK // 2,), 0, tl.uint32) + scale.to(tl.uint32, bitcast=True)
                place = start + row_bytes // 2 + half.to(tl.int64) * 16
                put_all(buffers, multicast, place, bits, bits, bits, bits, half < 1, WORLD, WAY)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
    if COPY_OUT:
        for peer in range(WORLD):
            for row in range(block, num_rows, step):
                line = (peer * num_rows + row).to(tl.int64)
                start = own + line * row_bytes
                if FP8 == "no":
                    w0, w1, w2, w3 = get(start + at_lane, inside)
                    store(out + line * row_bytes + at_lane, w0, w1, w2, w3, inside)
                else:
                    half = tl.arange(0, BLOCK // 2)
                    at_half = half.to(tl.int64) * 16
                    data = half < row_vectors // 2
                    w0, w1, w2, w3 = get(start + at_half, data)
                    store(out + line * (row_bytes // 2) + at_half, w0, w1, w2, w3, data)
                    if FP8 == "rows":
                        w0, w1, w2, w3 = get(start + row_bytes // 2 + at_half, half < 1)
                        number = w0.to(tl.float32, bitcast=True)
                        tl.store(scales + line + half, number, mask=half < 1)
