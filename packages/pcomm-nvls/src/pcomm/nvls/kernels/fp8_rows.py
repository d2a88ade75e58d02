"""A row of numbers of two bytes as 8-bit floats (e4m3, no infinities), with a scale."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.rms_norm import largest
from pcomm.nvls.primitives.emulation import EMULATED
from pcomm.nvls.primitives.words import floats_of

__all__ = ["fp8_words", "row_scale"]

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
