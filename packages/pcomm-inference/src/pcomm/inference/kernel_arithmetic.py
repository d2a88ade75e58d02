"""What the Triton kernels of attention, layers and sampling share: dtypes and arithmetic.

Importing this file imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = ["DTYPES", "INTERPRETED", "dot", "rounded"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that kernels compute."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU."""


@triton.jit  # type: ignore[untyped-decorator]
def dot(left: tl.tensor, right: tl.tensor, before: tl.tensor) -> Any:
    """`before + left right`, in fp32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bf16 as integers; in fp32 each product is exact.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, before, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def rounded(number: tl.tensor, dtype: tl.constexpr) -> Any:
    """Numbers of fp32 in another dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # There a conversion cuts off.
        bits = number.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        number = tl.where(number == number, bits.to(tl.float32, bitcast=True), number)
    return number.to(dtype)
