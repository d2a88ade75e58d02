"""Sixteen bytes as four words of 32 bits, and as the numbers that they hold.

All kernels move 16 bytes at a time, the widest access there is, as four tensors of words. Sums are
made of fp32 numbers: eight of two bytes each, or four; the other four are zeros that the compiler
removes.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.emulation import EMULATED

__all__ = ["add_words", "floats_of", "words_of", "zero_floats"]

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
