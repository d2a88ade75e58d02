"""Accesses of 16 bytes to the memory of this rank, of one rank, and of all ranks at once.

A way that is not "peers" goes by the multicast address; `barrier` says what "fenced" adds.

Addresses and masks are tensors of one element a thread, or a multiple of that: inline assembly runs
once in every thread, and for a smaller tensor once for each copy of an element. What has an effect
is under the mask.

| | multicast | peers |
|---|---|---|
| `put_all` | one store, which the switch repeats on every rank | a store to each rank |
| `get_sum` | one load, summed in the switch | a load from each rank, summed in rank order |

All kernels move 16 bytes at a time, the widest access there is, as four tensors of words. Sums are
made of fp32 numbers: eight of two bytes each, or four; the other four are zeros that the compiler
removes.

Under the interpreter they are ordinary loads and stores, and the switch is a loop over the ranks
that sums in fp32 and rounds once.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.emulation import EMULATED

__all__ = [
    "add_words",
    "floats_of",
    "get",
    "get_sum",
    "load",
    "place_in_whole",
    "put",
    "put_all",
    "store",
    "words_of",
    "zero_floats",
]


# KIND is the name of the numbers: "bf16", "fp16" or "fp32".


@triton.jit  # type: ignore[untyped-decorator]
def _pair(word: tl.tensor, KIND: tl.constexpr) -> Any:
    """The two numbers of a word, the one at the lower address first."""
    if KIND == "bf16":
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _bits(number: tl.tensor, KIND: tl.constexpr) -> Any:
    """The bits of a number that is rounded to two bytes, to nearest and ties to even."""
    if KIND == "fp16":
        bits = number.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    elif EMULATED:
        # The interpreter cuts digits off. A carry into the exponent is right, one out of NaN not.
        whole = number.to(tl.uint32, bitcast=True)
        rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
        bits = tl.where(number == number, rounded, 0x7FFF)
    else:
        bits = number.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits


@triton.jit  # type: ignore[untyped-decorator]
def floats_of(
    w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, KIND: tl.constexpr
) -> Any:
    """The numbers of 16 bytes in fp32, in the order of their addresses; zeros after the fourth."""
    if KIND == "fp32":
        a0 = w0.to(tl.float32, bitcast=True)
        a1 = w1.to(tl.float32, bitcast=True)
        a2 = w2.to(tl.float32, bitcast=True)
        a3 = w3.to(tl.float32, bitcast=True)
        a4 = tl.full(a0.shape, 0.0, tl.float32)
        a5, a6, a7 = a4, a4, a4
    else:
        a0, a1 = _pair(w0, KIND)
        a2, a3 = _pair(w1, KIND)
        a4, a5 = _pair(w2, KIND)
        a6, a7 = _pair(w3, KIND)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit  # type: ignore[untyped-decorator]
def words_of(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    a4: tl.tensor,
    a5: tl.tensor,
    a6: tl.tensor,
    a7: tl.tensor,
    KIND: tl.constexpr,
) -> Any:
    """The 16 bytes that hold these numbers, each rounded once."""
    if KIND == "fp32":
        w0 = a0.to(tl.uint32, bitcast=True)
        w1 = a1.to(tl.uint32, bitcast=True)
        w2 = a2.to(tl.uint32, bitcast=True)
        w3 = a3.to(tl.uint32, bitcast=True)
    else:
        w0 = _bits(a0, KIND) | (_bits(a1, KIND) << 16)
        w1 = _bits(a2, KIND) | (_bits(a3, KIND) << 16)
        w2 = _bits(a4, KIND) | (_bits(a5, KIND) << 16)
        w3 = _bits(a6, KIND) | (_bits(a7, KIND) << 16)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def zero_floats(BLOCK: tl.constexpr) -> Any:
    """Eight tensors of zeros, to add to."""
    zero = tl.full((BLOCK,), 0.0, tl.float32)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit  # type: ignore[untyped-decorator]
def add_words(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    a4: tl.tensor,
    a5: tl.tensor,
    a6: tl.tensor,
    a7: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    KIND: tl.constexpr,
) -> Any:
    """The fp32 numbers and those of 16 bytes, added."""
    b0, b1, b2, b3, b4, b5, b6, b7 = floats_of(w0, w1, w2, w3, KIND)
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


_LOAD = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @%inside ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
# Memory that other ranks write to: never from a cache that does not see them.
_GET = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @%inside ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_STORE = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $6, 0;
    mov.b32 $0, 0;
    @%inside st.global.v4.b32 [$1], {$2, $3, $4, $5};
}""")
_PUT = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $6, 0;
    mov.b32 $0, 0;
    @%inside st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
}""")
_PUT_ALL = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $6, 0;
    mov.b32 $0, 0;
    @%inside multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
}""")
_GET_SUM_BF16 = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @%inside multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];
}""")
_GET_SUM_FP16 = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @%inside multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4];
}""")
_GET_SUM_FP32 = tl.constexpr("""{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @%inside multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
}""")
# Outputs are written before inputs are read, so they need registers of their own.
_READS = tl.constexpr("=&r,=&r,=&r,=&r,l,r")
_WRITES = tl.constexpr("=&r,l,r,r,r,r,r")


@triton.jit  # type: ignore[untyped-decorator]
def _read(address: tl.tensor, mask: tl.tensor, ASSEMBLY: tl.constexpr) -> Any:
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        _READS,
        [address, mask.to(tl.int32)],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    address: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    mask: tl.tensor,
    ASSEMBLY: tl.constexpr,
) -> None:
    tl.inline_asm_elementwise(
        ASSEMBLY,
        _WRITES,
        [address, w0, w1, w2, w3, mask.to(tl.int32)],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _emulated_read(address: tl.tensor, mask: tl.tensor) -> Any:
    place = address.to(tl.pointer_type(tl.uint32))
    w0 = tl.load(place, mask=mask, other=0)
    w1 = tl.load(place + 1, mask=mask, other=0)
    w2 = tl.load(place + 2, mask=mask, other=0)
    w3 = tl.load(place + 3, mask=mask, other=0)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _emulated_write(
    address: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, mask: tl.tensor
) -> None:
    place = address.to(tl.pointer_type(tl.uint32))
    tl.store(place, w0, mask=mask)
    tl.store(place + 1, w1, mask=mask)
    tl.store(place + 2, w2, mask=mask)
    tl.store(place + 3, w3, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def load(address: tl.tensor, mask: tl.tensor) -> Any:
    """Four words at each address, of memory that no other rank writes to."""
    if EMULATED:
        w0, w1, w2, w3 = _emulated_read(address, mask)
    else:
        w0, w1, w2, w3 = _read(address, mask, _LOAD)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def get(address: tl.tensor, mask: tl.tensor) -> Any:
    """Four words at each address, of symmetric memory of this or another rank."""
    if EMULATED:
        w0, w1, w2, w3 = _emulated_read(address, mask)
    else:
        w0, w1, w2, w3 = _read(address, mask, _GET)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def store(
    address: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, mask: tl.tensor
) -> None:
    """Four words to each address, of memory that no other rank reads."""
    if EMULATED:
        _emulated_write(address, w0, w1, w2, w3, mask)
    else:
        _write(address, w0, w1, w2, w3, mask, _STORE)


@triton.jit  # type: ignore[untyped-decorator]
def put(
    address: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, mask: tl.tensor
) -> None:
    """Four words to each address, of symmetric memory of this or another rank."""
    if EMULATED:
        _emulated_write(address, w0, w1, w2, w3, mask)
    else:
        _write(address, w0, w1, w2, w3, mask, _PUT)


@triton.jit  # type: ignore[untyped-decorator]
def put_all(
    buffers: tl.tensor,
    multicast: tl.tensor,
    offset: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    mask: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
) -> None:
    """Four words to each byte offset of every rank's buffer, this rank's too."""
    if WAY != "peers" and not EMULATED:
        _write(multicast + offset, w0, w1, w2, w3, mask, _PUT_ALL)
    else:
        for peer in range(WORLD):
            put(tl.load(buffers + peer) + offset, w0, w1, w2, w3, mask)


@triton.jit  # type: ignore[untyped-decorator]
def get_sum(
    buffers: tl.tensor,
    multicast: tl.tensor,
    offset: tl.tensor,
    mask: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Four words at each byte offset, summed over the buffers of all ranks and rounded once."""
    if WAY != "peers" and not EMULATED:
        if KIND == "bf16":
            w0, w1, w2, w3 = _read(multicast + offset, mask, _GET_SUM_BF16)
        elif KIND == "fp16":
            w0, w1, w2, w3 = _read(multicast + offset, mask, _GET_SUM_FP16)
        else:
            w0, w1, w2, w3 = _read(multicast + offset, mask, _GET_SUM_FP32)
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = zero_floats(BLOCK)
        for peer in range(WORLD):
            v0, v1, v2, v3 = get(tl.load(buffers + peer) + offset, mask)
            a0, a1, a2, a3, a4, a5, a6, a7 = add_words(
                a0, a1, a2, a3, a4, a5, a6, a7, v0, v1, v2, v3, KIND
            )
        w0, w1, w2, w3 = words_of(a0, a1, a2, a3, a4, a5, a6, a7, KIND)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def place_in_whole(
    index: tl.tensor, segment: tl.tensor, row_vectors: tl.tensor, WORLD: tl.constexpr
) -> tl.tensor:
    """Places (int64) of the vectors `index` (int32) of a segment, in units of 16 bytes.

    A row of the whole has `row_vectors` of each of the `WORLD` segments. Where a row is all of a
    segment, so there is one row, the segments follow each other.
    """
    row = (index // row_vectors).to(tl.int64)
    return (row * WORLD + segment) * row_vectors + index % row_vectors
