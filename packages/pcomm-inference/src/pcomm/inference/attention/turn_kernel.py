"""Heads of a prompt are normed, turned and kept in one launch; the same for a kernel that decodes.

Importing this file imports Triton. Products and sums are rounded where torch rounds them when it
norms, multiplies and adds in operations of their own.
"""

# Shape suffixes: T tokens, H query heads, G key heads, K width of a key, V width of a value.

from __future__ import annotations

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.kernel_arithmetic import rounded
from pcomm.inference.model import KVMemory

__all__ = ["New", "Shape", "Turn", "keep", "turn_launch", "turned_queries"]


class New(NamedTuple):
    """Heads of new tokens as projections give them: `[T, H, K]`, `[T, G, K]` and `[T, G, V]`."""

    q: Any
    k: Any
    v: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any

    @classmethod
    def of(cls, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor) -> New:
        """Those of the tensors."""
        return cls(q_THK, k_TGK, v_TGV, q_THK.stride(), k_TGK.stride(), v_TGV.stride())


class Shape(NamedTuple):
    """Key heads, queries of each, and widths, each a `tl.constexpr`, some padded."""

    KEY_HEADS: Any
    ROWS: Any
    PADDED_ROWS: Any
    WIDTH: Any
    PADDED_WIDTH: Any
    VALUE_WIDTH: Any
    PADDED_VALUE_WIDTH: Any

    @classmethod
    def of(cls, new: New, least: int = 1) -> Shape:
        """Those of heads, padded to powers of two from `least` on."""
        key_heads, width = new.k.shape[1:]
        sizes = [key_heads]
        for size in (new.q.shape[1] // key_heads, width, new.v.shape[2]):
            sizes += [size, max(least, triton.next_power_of_2(size))]
        return cls(*map(tl.constexpr, sizes))


class Turn(NamedTuple):
    """What kernels are told of a `HeadTurn`: the last three are each a `tl.constexpr`.

    Without a rotation there are no pairs; a norm that there is not has None for its weight.
    """

    cosines: Any
    cosine_strides: Any
    sines: Any
    sine_strides: Any
    query_norm: Any
    query_eps: Any
    key_norm: Any
    key_eps: Any
    PAIRS: Any
    QUERY_ADDS_ONE: Any
    KEY_ADDS_ONE: Any

    @classmethod
    def of(cls, turn: HeadTurn | None) -> Turn:
        """That of norm and rotation, or of neither."""
        if turn is None:
            return cls(*8 * (None,), tl.constexpr(0), *2 * (tl.constexpr(False),))
        cos_TR, sin_TR, *norms = turn.cosines_TR, turn.sines_TR, turn.query_norm, turn.key_norm
        told = [x for one in norms for x in ((one.weight, one.eps) if one else (None, None))]
        adds_one = (one is not None and one.is_zero_centred for one in norms)
        constants = map(tl.constexpr, (cos_TR.shape[1], *adds_one))
        return cls(cos_TR, cos_TR.stride(), sin_TR, sin_TR.stride(), *told, *constants)


@triton.jit  # type: ignore[untyped-decorator]
def turned_queries(new: New, turn: Turn, shape: Shape, token: tl.tensor, head: tl.tensor) -> Any:
    """`[PADDED_ROWS, PADDED_WIDTH]`, the queries of a token that read a key head."""
    row = tl.arange(0, shape.PADDED_ROWS)
    heads = new.q + token * new.q_strides[0] + (head * shape.ROWS + row) * new.q_strides[1]
    norm, eps, stride = turn.query_norm, turn.query_eps, new.q_strides[2]
    is_head, adds_one = row < shape.ROWS, turn.QUERY_ADDS_ONE
    return _turned(heads, is_head, stride, norm, eps, adds_one, turn, shape, token)


@triton.jit  # type: ignore[untyped-decorator]
def keep(
    new: New,
    turn: Turn,
    shape: Shape,
    keys: tl.tensor,
    values: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    place: tl.tensor,
) -> Any:
    """Write a key head of a token, and its value, to their place; the key, before it is rounded."""
    one = tl.arange(0, 1)
    heads = new.k + token * new.k_strides[0] + head * new.k_strides[1] + one
    norm, eps, stride = turn.key_norm, turn.key_eps, new.k_strides[2]
    key = _turned(heads, one == 0, stride, norm, eps, turn.KEY_ADDS_ONE, turn, shape, token)
    kept = rounded(key.to(tl.float32), keys.dtype.element_ty)
    column = tl.arange(0, shape.PADDED_VALUE_WIDTH)
    is_value = column < shape.VALUE_WIDTH
    start = new.v + token * new.v_strides[0] + head * new.v_strides[1]
    value = tl.load(start + column * new.v_strides[2], mask=is_value)
    value = rounded(value.to(tl.float32), values.dtype.element_ty)
    at = tl.arange(0, shape.PADDED_WIDTH)[None, :]
    tl.store(keys + place * shape.WIDTH + at, kept, mask=at < shape.WIDTH)
    tl.store(values + place * shape.VALUE_WIDTH + column, value, mask=is_value)
    return key


@triton.jit  # type: ignore[untyped-decorator]
def _turned(
    heads: tl.tensor,
    is_head: tl.tensor,
    column_stride: tl.tensor,
    norm: tl.tensor | None,
    eps: tl.tensor | None,
    ADDS_ONE: tl.constexpr,
    turn: Turn,
    shape: Shape,
    token: tl.tensor,
) -> Any:
    """Heads of one token, `[len(heads), PADDED_WIDTH]`, normed and turned; zero behind `WIDTH`.

    `heads` are the places where they begin.
    """
    column = tl.arange(0, shape.PADDED_WIDTH)
    is_read = is_head[:, None] & (column < shape.WIDTH)[None, :]
    own = tl.load(heads[:, None] + (column * column_stride)[None, :], mask=is_read, other=0.0)
    dtype = own.dtype
    wide = own.to(tl.float32)
    factor = tl.full([heads.shape[0]], 1.0, tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / shape.WIDTH + eps)
        wide = _scaled(wide, factor, norm, column, ADDS_ONE, shape, dtype)
    if turn.PAIRS > 0:
        is_first, is_turned = column < turn.PAIRS, column < 2 * turn.PAIRS
        second = tl.where(is_turned, column - turn.PAIRS, column)
        partner = tl.where(is_first, column + turn.PAIRS, second)
        other = tl.load(
            heads[:, None] + (partner * column_stride)[None, :], mask=is_read, other=0.0
        )
        other = other.to(tl.float32)
        if norm is not None:
            other = _scaled(other, factor, norm, partner, ADDS_ONE, shape, dtype)
        pair = tl.where(is_first, column, column - turn.PAIRS)
        cosines = turn.cosines + token * turn.cosine_strides[0] + pair * turn.cosine_strides[1]
        sines = turn.sines + token * turn.sine_strides[0] + pair * turn.sine_strides[1]
        cosine = tl.load(cosines, mask=is_turned, other=1.0).to(tl.float32)
        sine = tl.load(sines, mask=is_turned, other=0.0).to(tl.float32)
        sine = tl.where(is_first, -sine, sine)
        straight = rounded(wide * cosine[None, :], dtype).to(tl.float32)
        both = rounded(straight + other * sine[None, :], dtype).to(tl.float32)
        # Not by a sine of zero, which makes NaN of infinity.
        wide = tl.where(is_turned[None, :], both, wide)
    return wide.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(
    wide: tl.tensor,
    factor: tl.tensor,
    norm: tl.tensor,
    column: tl.tensor,
    ADDS_ONE: tl.constexpr,
    shape: Shape,
    dtype: tl.constexpr,
) -> Any:
    scale = tl.load(norm + column, mask=column < shape.WIDTH, other=0.0).to(tl.float32)
    if ADDS_ONE:
        scale += 1.0
    return rounded(wide * factor[:, None] * scale[None, :], dtype).to(tl.float32)


def turn_launch(
    new: tuple[Tensor, Tensor, Tensor],
    memory: KVMemory,
    slots_T: Tensor,
    turn: HeadTurn,
    q_out_THK: Tensor,
    k_out_TGK: Tensor,
) -> KernelLaunch:
    """The launch that turns the heads of new tokens and writes keys and values to their blocks.

    Args:
        new: Queries `[T, H, K]`, keys `[T, G, K]` and values `[T, G, V]` as projections give them.
        memory: Blocks of the layer.
        slots_T: int64, the places of the tokens in the blocks.
        turn: Norm and rotation of these tokens.
        q_out_THK: Place of the turned queries, contiguous.
        k_out_TGK: Place of the turned keys, contiguous.
    """
    told = New.of(*new)
    arguments = {
        "new": told,
        "turn": Turn.of(turn),
        "shape": Shape.of(told),
        "keys": memory.keys,
        "values": memory.values,
        "slots": slots_T,
        "turned": q_out_THK,
        "seen": k_out_TGK,
    }
    grid = k_out_TGK.shape[:2]
    return KernelLaunch(turn_kernel, tuple(grid), arguments, q_out_THK.device)


@triton.jit  # type: ignore[untyped-decorator]
def turn_kernel(
    new: New,
    turn: Turn,
    shape: Shape,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    turned: tl.tensor,
    seen: tl.tensor,
) -> None:
    """One key head of one token, with the query heads that read it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, shape.PADDED_ROWS), tl.arange(0, shape.PADDED_WIDTH)
    query = turned_queries(new, turn, shape, token, head)
    first = token * shape.KEY_HEADS + head
    place = (first * shape.ROWS + row) * shape.WIDTH
    is_query = (row < shape.ROWS)[:, None] & (column < shape.WIDTH)[None, :]
    tl.store(turned + place[:, None] + column[None, :], query, mask=is_query)
    slot = tl.load(slots + token) * shape.KEY_HEADS + head
    key = keep(new, turn, shape, keys, values, token, head, slot)
    at = column[None, :]
    tl.store(seen + first * shape.WIDTH + at, key, mask=at < shape.WIDTH)
