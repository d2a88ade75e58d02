"""Heads of a prompt are normed, turned and kept in one launch; the same for a kernel that decodes.

Importing this file imports Triton. Products and sums are rounded where torch rounds them when it
norms, multiplies and adds in operations of their own.
"""

# Shape suffixes: T tokens, H query heads, G key heads, K width of a key, V width of a value.

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.language.standard import _sum_combine  # type: ignore[import-untyped]

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.kernel_arithmetic import rounded
from pcomm.inference.model import KVMemory

__all__ = ["turn_arguments", "turn_launch", "turned"]


def turn_arguments(turn: HeadTurn | None, unused: Tensor) -> dict[str, Any]:
    """What `turned` is told, of a kernel that has these parameters.

    Args:
        turn: Norm and rotation; None for neither.
        unused: Any tensor, which stands for those that are not read.
    """
    tables = (unused, unused) if turn is None else (turn.cosines_TR, turn.sines_TR)
    query_norm = None if turn is None else turn.query_norm
    key_norm = None if turn is None else turn.key_norm
    return {
        "cosines": tables[0],
        "sines": tables[1],
        "query_norm": unused if query_norm is None else query_norm.weight,
        "key_norm": unused if key_norm is None else key_norm.weight,
        "cosine_stride": 0 if turn is None else tables[0].stride(0),
        "sine_stride": 0 if turn is None else tables[1].stride(0),
        "query_eps": 0.0 if query_norm is None else query_norm.eps,
        "key_eps": 0.0 if key_norm is None else key_norm.eps,
        "PAIRS": 0 if turn is None else tables[0].shape[1],
        "HAS_NORM": query_norm is not None,
        "ADDS_ONE": query_norm is not None and query_norm.is_zero_centred,
    }


@triton.jit  # type: ignore[untyped-decorator]
def turned(
    heads: tl.tensor,
    is_head: tl.tensor,
    column_stride: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> Any:
    """Heads of one token, `[len(heads), PADDED_WIDTH]`, normed and turned; zero behind `WIDTH`.

    `heads` are the places where they begin; `cosines` and `sines` are those of the token.
    """
    column = tl.arange(0, PADDED_WIDTH)
    is_read = is_head[:, None] & (column < WIDTH)[None, :]
    own = tl.load(heads[:, None] + (column * column_stride)[None, :], mask=is_read, other=0.0)
    dtype = own.dtype
    wide = own.to(tl.float32)
    factor = tl.full([heads.shape[0]], 1.0, tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.reduce(wide * wide, 1, _sum_combine) / WIDTH + eps)
        wide = _scaled(wide, factor, norm, column, WIDTH, ADDS_ONE, dtype)
    if PAIRS > 0:
        is_first, is_turned = column < PAIRS, column < 2 * PAIRS
        partner = tl.where(is_first, column + PAIRS, tl.where(is_turned, column - PAIRS, column))
        other = tl.load(
            heads[:, None] + (partner * column_stride)[None, :], mask=is_read, other=0.0
        )
        other = other.to(tl.float32)
        if HAS_NORM:
            other = _scaled(other, factor, norm, partner, WIDTH, ADDS_ONE, dtype)
        pair = tl.where(is_first, column, column - PAIRS)
        cosine = tl.load(cosines + pair, mask=is_turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + pair, mask=is_turned, other=0.0).to(tl.float32)
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
    WIDTH: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    scale = tl.load(norm + column, mask=column < WIDTH, other=0.0).to(tl.float32)
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
        k_out_TGK: Place of the turned keys as they are kept, contiguous.
    """
    q_THK, k_TGK, v_TGV = new
    key_heads, width = k_TGK.shape[1:]
    rows = q_THK.shape[1] // key_heads
    arguments = {
        "queries": q_THK,
        "new_keys": k_TGK,
        "new_values": v_TGV,
        "keys": memory.keys,
        "values": memory.values,
        "slots": slots_T,
        "turned_queries": q_out_THK,
        "turned_keys": k_out_TGK,
        "query_strides": q_THK.stride(),
        "key_strides": k_TGK.stride(),
        "value_strides": v_TGV.stride(),
        **turn_arguments(turn, slots_T),
        "KEY_HEADS": key_heads,
        "ROWS": rows,
        "PADDED_ROWS": triton.next_power_of_2(rows),
        "WIDTH": width,
        "PADDED_WIDTH": triton.next_power_of_2(width),
        "VALUE_WIDTH": v_TGV.shape[2],
        "PADDED_VALUE_WIDTH": triton.next_power_of_2(v_TGV.shape[2]),
    }
    return KernelLaunch(turn_kernel, (len(q_THK), key_heads), arguments, q_THK.device)


@triton.jit  # type: ignore[untyped-decorator]
def turn_kernel(
    queries: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    turned_queries: tl.tensor,
    turned_keys: tl.tensor,
    query_strides: tl.tuple,
    key_strides: tl.tuple,
    value_strides: tl.tuple,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cosine_stride: tl.tensor,
    sine_stride: tl.tensor,
    query_eps: tl.tensor,
    key_eps: tl.tensor,
    PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PADDED_VALUE_WIDTH: tl.constexpr,
) -> None:
    """One key head of one token, with the query heads that read it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, PADDED_ROWS), tl.arange(0, PADDED_WIDTH)
    is_row, is_column = row < ROWS, column < WIDTH
    cosines += token * cosine_stride
    sines += token * sine_stride
    query_head = head * ROWS + row
    query = turned(
        queries + token * query_strides[0] + query_head * query_strides[1],
        is_row,
        query_strides[2],
        cosines,
        sines,
        query_norm,
        query_eps,
        WIDTH,
        PADDED_WIDTH,
        PAIRS,
        HAS_NORM,
        ADDS_ONE,
    )
    place = (token * KEY_HEADS * ROWS + query_head) * WIDTH
    is_query = is_row[:, None] & is_column[None, :]
    tl.store(turned_queries + place[:, None] + column[None, :], query, mask=is_query)
    one = tl.arange(0, 1)
    key = turned(
        new_keys + token * key_strides[0] + head * key_strides[1] + one,
        one == 0,
        key_strides[2],
        cosines,
        sines,
        key_norm,
        key_eps,
        WIDTH,
        PADDED_WIDTH,
        PAIRS,
        HAS_NORM,
        ADDS_ONE,
    )
    slot = tl.load(slots + token) * KEY_HEADS + head
    kept = rounded(key.to(tl.float32), keys.dtype.element_ty)
    at = column[None, :]
    tl.store(keys + slot * WIDTH + at, kept, mask=is_column[None, :])
    place = (token * KEY_HEADS + head) * WIDTH
    seen = rounded(kept.to(tl.float32), key.dtype)
    tl.store(turned_keys + place + at, seen, mask=is_column[None, :])
    value_column = tl.arange(0, PADDED_VALUE_WIDTH)
    is_value = value_column < VALUE_WIDTH
    new = new_values + token * value_strides[0] + head * value_strides[1]
    value = tl.load(new + value_column * value_strides[2], mask=is_value)
    value = rounded(value.to(tl.float32), values.dtype.element_ty)
    tl.store(values + slot * VALUE_WIDTH + value_column, value, mask=is_value)
