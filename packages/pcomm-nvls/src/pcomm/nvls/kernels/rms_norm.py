"""One row of the residual stream: a sum added to it, and the root-mean-square norm of it.

A row is a tensor of 16-byte words, its lanes behind the end zero. Where a model without fused
operations rounds, these round, too: the sum over the ranks, the residual, the normed row. In
between all is fp32. Division and root are rounded as IEEE 754 says, so that torch gets the same.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.emulation import EMULATED
from pcomm.nvls.primitives.words import add_words, floats_of, words_of

__all__ = ["add_residual", "largest", "rms_norm"]


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
