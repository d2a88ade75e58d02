"""A sum over the ranks, the residual and its RMS norm in one kernel; rows also as 8-bit floats.

A row is a tensor of 16-byte words, its lanes behind the end zero. Where a model without fused
operations rounds, these round, too: the sum over the ranks, the residual, the normed row. In
between all is fp32. Division and root are rounded as IEEE 754 says, so that torch gets the same.
8-bit floats are e4m3 without infinities, with a scale.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import (
    add_words,
    floats_of,
    get,
    get_sum,
    load,
    put,
    put_all,
    store,
    words_of,
)
from pcomm.nvls.primitives.barrier import barrier
from pcomm.nvls.primitives.emulation import EMULATED

__all__ = [
    "add_residual",
    "all_reduce_add_rmsnorm_kernel",
    "fp8_words",
    "largest",
    "reduce_scatter_add_rmsnorm_all_gather_kernel",
    "rms_norm",
    "row_scale",
]


@triton.jit  # type: ignore[untyped-decorator]
def _add(a: tl.tensor, b: tl.tensor) -> Any:
    return a + b


@triton.jit  # type: ignore[untyped-decorator]
def _larger(a: tl.tensor, b: tl.tensor) -> Any:
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _over_lanes(x: tl.tensor, LARGEST: tl.constexpr) -> Any:
    """The sum of all lanes, or the largest one: a number, or under the interpreter one lane."""
    if EMULATED:
        # Where a reduction is a call in Python for each lane.
        while x.shape[0] > 1:
            a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
            x = tl.maximum(a, b) if LARGEST else a + b
    elif LARGEST:
        x = tl.reduce(x, 0, _larger)
    else:
        x = tl.reduce(x, 0, _add)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def add_residual(
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    r0: tl.tensor,
    r1: tl.tensor,
    r2: tl.tensor,
    r3: tl.tensor,
    KIND: tl.constexpr,
) -> Any:
    """The numbers of both rows, added in fp32 and rounded to their own type."""
    a0, a1, a2, a3, a4, a5, a6, a7 = floats_of(w0, w1, w2, w3, KIND)
    a0, a1, a2, a3, a4, a5, a6, a7 = add_words(a0, a1, a2, a3, a4, a5, a6, a7, r0, r1, r2, r3, KIND)
    s0, s1, s2, s3 = words_of(a0, a1, a2, a3, a4, a5, a6, a7, KIND)
    return s0, s1, s2, s3


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm(
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    v0: tl.tensor,
    v1: tl.tensor,
    v2: tl.tensor,
    v3: tl.tensor,
    inverse_hidden: tl.tensor,
    eps: tl.tensor,
    KIND: tl.constexpr,
) -> Any:
    """The row `w` over its root mean square, times the weight `v`, rounded once.

    Both are words of numbers of `KIND`. `inverse_hidden` is 1 over the length of the row, in
    numbers, and `eps` is added to the mean square.
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = floats_of(w0, w1, w2, w3, KIND)
    squares = a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3 + a4 * a4 + a5 * a5 + a6 * a6 + a7 * a7
    mean = _over_lanes(squares, False) * inverse_hidden
    root = tl.sqrt_rn(mean + eps)
    inverse = tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)
    b0, b1, b2, b3, b4, b5, b6, b7 = floats_of(v0, v1, v2, v3, KIND)
    n0, n1, n2, n3 = words_of(
        a0 * inverse * b0,
        a1 * inverse * b1,
        a2 * inverse * b2,
        a3 * inverse * b3,
        a4 * inverse * b4,
        a5 * inverse * b5,
        a6 * inverse * b6,
        a7 * inverse * b7,
        KIND,
    )
    return n0, n1, n2, n3


@triton.jit  # type: ignore[untyped-decorator]
def largest(w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, KIND: tl.constexpr) -> Any:
    """The largest magnitude in a row, as fp32."""
    a0, a1, a2, a3, a4, a5, a6, a7 = floats_of(w0, w1, w2, w3, KIND)
    a0 = tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3)))
    a4 = tl.maximum(tl.maximum(tl.abs(a4), tl.abs(a5)), tl.maximum(tl.abs(a6), tl.abs(a7)))
    return _over_lanes(tl.maximum(a0, a4), True)


# The largest number that e4m3 holds, and a scale so small that it is used for rows of zeros only.
_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-64)


@triton.jit  # type: ignore[untyped-decorator]
def row_scale(
    w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, KIND: tl.constexpr
) -> Any:
    """The scale by which the largest number of a row becomes the largest that e4m3 holds."""
    magnitude = largest(w0, w1, w2, w3, KIND)
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, _LARGEST, tl.float32))
    # Not the maximum: of NaN that is another number under the interpreter than on a device.
    return tl.where(scale > _SMALLEST_SCALE, scale, _SMALLEST_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def _emulated_byte(number: tl.tensor) -> Any:
    """A number within the range, rounded to nearest, ties to even; the interpreter cuts off."""
    whole = number.to(tl.uint32, bitcast=True)
    sign = (whole >> 24) & 0x80
    magnitude = whole & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9; the addition rounds to one.
    multiple = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    small = multiple.to(tl.uint32, bitcast=True) & 0xF
    byte = tl.where(magnitude < 0x3C800000, small, normal)
    return sign | tl.where(number == number, byte, 0x7F)


@triton.jit  # type: ignore[untyped-decorator]
def _byte(number: tl.tensor, factor: tl.tensor) -> Any:
    """The e4m3 number of `number * factor`, the largest one where that is larger."""
    number = number * factor
    # Comparisons and not a minimum: NaN stays.
    number = tl.where(number > _LARGEST, _LARGEST, number)
    number = tl.where(number < -_LARGEST, -_LARGEST, number)
    if EMULATED:
        byte = _emulated_byte(number)
    else:
        byte = number.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
    return byte


@triton.jit  # type: ignore[untyped-decorator]
def fp8_words(
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    scale: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Half as many vectors: the 16 numbers of each two neighbours, over `scale`, as e4m3."""
    factor = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    a0, a1, a2, a3, a4, a5, a6, a7 = floats_of(w0, w1, w2, w3, KIND)
    low = _byte(a0, factor) | (_byte(a1, factor) << 8)
    low = low | (_byte(a2, factor) << 16) | (_byte(a3, factor) << 24)
    high = _byte(a4, factor) | (_byte(a5, factor) << 8)
    high = high | (_byte(a6, factor) << 16) | (_byte(a7, factor) << 24)
    b0, b2 = tl.split(tl.reshape(low, (BLOCK // 2, 2)))
    b1, b3 = tl.split(tl.reshape(high, (BLOCK // 2, 2)))
    return b0, b1, b2, b3


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
        WAY: "multicast", "fenced multicast" or "peers".
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
        out: Address of the normed rows of all ranks; may be `x`.
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
        WAY: "multicast", "fenced multicast" or "peers".
        ENTRY: True where the operation before may have used the same slot.
        IN_PLACE: True where the addends are in the slot already.
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
