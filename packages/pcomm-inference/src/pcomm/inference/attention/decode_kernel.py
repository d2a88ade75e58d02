"""One new token of each request attends to the blocks of its request: one launch a layer.

Importing this file imports Triton. A program serves the query heads of one key head of one request
over a part of its keys (a split), reads them where they lie, and leaves its sum in a scratch
tensor; the last program of a request and head that arrives adds up the splits in their order. So
nothing is copied, nothing is read behind the last key, and many processors share a long request.

How a request is cut depends on its own number of keys alone, and so does the order of every sum:
the bits of a row do not depend on the rest of the batch, nor on the width of the block tables.

The program of the newest key writes it, and its value, before it reads the others: no other program
reads that place. So the launch also takes the place of the two that write keys and values, and of
those that norm and turn queries and keys by their positions.

Source:
    Dao et al., Flash-Decoding for long-context inference, 2023; Kwon et al., Efficient Memory
    Management for Large Language Model Serving with PagedAttention, 2023.
"""

# Shape suffixes: N requests, H query heads, G key heads, K width of a key, V width of a value, B
# blocks of the longest request, Z splits.

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.language.standard import _elementwise_max, _sum_combine  # type: ignore[import-untyped]

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.attention.scores import PLAIN, Softmax
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.attention.turn_kernel import turn_arguments, turned
from pcomm.inference.kernel_arithmetic import DTYPES, dot, rounded
from pcomm.inference.model import KVMemory

__all__ = ["decode_kernel", "decode_launch", "takes"]

# Keys of a split, as long as there are no more than so many splits; keys of a step of its loop.
_SPLIT, _MOST_SPLITS, _TILE = 256, 64, 64
# Fewest rows and columns of a matrix that the tensor cores multiply.
_LEAST = 16
# Widest key or value, so that a tile of both and the sums fit in the registers and shared memory.
_MOST_WIDTH = 256


def takes(q_NHK: Tensor, memory: KVMemory) -> bool:
    """Whether the kernel computes such layers."""
    width = max(memory.keys.shape[3], memory.values.shape[3])
    return q_NHK.dtype in DTYPES and memory.keys.dtype in DTYPES and width <= _MOST_WIDTH


def decode_launch(
    new: tuple[Tensor, Tensor, Tensor],
    memory: KVMemory,
    places: tuple[Tensor, Tensor],
    out_NHV: Tensor,
    prepared: dict[Any, Any],
    softmax: Softmax = PLAIN,
    window: int | None = None,
    turn: HeadTurn | None = None,
) -> KernelLaunch:
    """The launch for one layer; it also writes the new keys and values. No wait for the device.

    Args:
        new: Queries `[N, H, K]`, keys `[N, G, K]` and values `[N, G, V]` of the new tokens.
        memory: Blocks of the layer.
        places: int32, contiguous: blocks `[N, B]` of each request, which cover the new token, and
            the number `[N]` of tokens before it.
        out_NHV: Place of the result, contiguous.
        prepared: Keeps the scratch tensors for the other layers of the step.
        softmax: How scores become weights.
        window: Number of keys that a token sees; None for all.
        turn: How the kernel norms and turns the new queries and keys; None where it has been done.
    """
    (q_NHK, k_NGK, v_NGV), (tables_NB, contexts_N) = new, places
    num_requests, num_heads, width = q_NHK.shape
    _, block_size, key_heads, value_width = memory.values.shape
    rows = num_heads // key_heads
    most_keys = tables_NB.shape[1] * block_size
    if window is not None:
        most_keys = min(most_keys, window)
    num_splits = min(_MOST_SPLITS, -(-most_keys // _SPLIT))
    key = (decode_launch, num_requests, key_heads, rows, value_width, num_splits, q_NHK.device)
    if key not in prepared:
        shape = (num_requests, key_heads, num_splits, rows)
        prepared[key] = (
            q_NHK.new_empty(*shape, value_width, dtype=torch.float32),
            q_NHK.new_empty(2, *shape, dtype=torch.float32),
            q_NHK.new_zeros(num_requests, key_heads, dtype=torch.int32),
        )
    sums, stats, arrivals = prepared[key]
    scale = width**-0.5 if softmax.scale is None else softmax.scale
    arguments = {
        "queries": q_NHK,
        "new_keys": k_NGK,
        "new_values": v_NGV,
        "keys": memory.keys,
        "values": memory.values,
        "tables": tables_NB,
        "contexts": contexts_N,
        # Not read where there are none; a pointer all the same, so that there is one signature.
        "sinks": contexts_N if softmax.sinks_H is None else softmax.sinks_H,
        "slopes": contexts_N if softmax.alibi_H is None else softmax.alibi_H,
        "out": out_NHV,
        "sums": sums,
        "largest": stats[0],
        "totals": stats[1],
        "arrivals": arrivals,
        "table_width": tables_NB.shape[1],
        "num_splits": num_splits,
        "scale": scale,
        "softcap": 1.0 if softmax.softcap is None else softmax.softcap,
        "window": 0 if window is None else window,
        "query_strides": q_NHK.stride(),
        "key_strides": k_NGK.stride(),
        "value_strides": v_NGV.stride(),
        **turn_arguments(turn, contexts_N),
        "KEY_HEADS": key_heads,
        "ROWS": rows,
        "PADDED_ROWS": _padded(rows),
        "WIDTH": width,
        "PADDED_WIDTH": _padded(width),
        "VALUE_WIDTH": value_width,
        "PADDED_VALUE_WIDTH": _padded(value_width),
        "BLOCK_SIZE": block_size,
        "TILE": _TILE,
        "SPLIT": _SPLIT,
        "MOST_SPLITS": _MOST_SPLITS,
        "HAS_WINDOW": window is not None,
        "HAS_CAP": softmax.softcap is not None,
        "HAS_SINKS": softmax.sinks_H is not None,
        "HAS_SLOPES": softmax.alibi_H is not None,
    }
    grid = (num_requests, key_heads, num_splits)
    return KernelLaunch(decode_kernel, grid, arguments, q_NHK.device)


def _padded(count: int) -> int:
    return max(_LEAST, 1 << (count - 1).bit_length())


# -- the kernel ------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(
    queries: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    totals: tl.tensor,
    arrivals: tl.tensor,
    table_width: tl.tensor,
    num_splits: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
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
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
) -> None:
    """One split of one key head of one request; the last to arrive adds up all of them."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    newest = tl.load(contexts + request)
    first = newest * 0
    if HAS_WINDOW:
        first = tl.maximum(newest + 1 - window, 0)
    num_keys = newest + 1 - first
    # By the keys of this request alone.
    own_part = ((num_keys + MOST_SPLITS - 1) // MOST_SPLITS + TILE - 1) // TILE * TILE
    part = tl.maximum(own_part, SPLIT)
    used_splits = (num_keys + part - 1) // part
    if split >= used_splits:
        return
    start = first + split * part
    stop = tl.minimum(start + part, newest + 1)
    row = tl.arange(0, PADDED_ROWS)
    column = tl.arange(0, PADDED_WIDTH)
    value_column = tl.arange(0, PADDED_VALUE_WIDTH)
    is_row, is_column, is_value = row < ROWS, column < WIDTH, value_column < VALUE_WIDTH
    table = tables + request.to(tl.int64) * table_width
    cosines += request * cosine_stride
    sines += request * sine_stride
    if stop > newest:
        block = tl.load(table + newest // BLOCK_SIZE).to(tl.int64)
        place = (block * BLOCK_SIZE + newest % BLOCK_SIZE) * KEY_HEADS + head
        one = tl.arange(0, 1)
        new_key = turned(
            new_keys + request * key_strides[0] + head * key_strides[1] + one,
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
        new_key = rounded(new_key.to(tl.float32), keys.dtype.element_ty)
        new_value = tl.load(
            new_values
            + request * value_strides[0]
            + head * value_strides[1]
            + value_column * value_strides[2],
            mask=is_value,
        )
        new_value = rounded(new_value.to(tl.float32), values.dtype.element_ty)
        at = column[None, :]
        tl.store(keys + place * WIDTH + at, new_key, mask=is_column[None, :])
        tl.store(values + place * VALUE_WIDTH + value_column, new_value, mask=is_value)
        # All threads of the program read it below.
        tl.debug_barrier()
    query_head = head * ROWS + row
    query = turned(
        queries + request * query_strides[0] + query_head * query_strides[1],
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
    slope = tl.full([PADDED_ROWS], 0.0, tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + query_head, mask=is_row, other=0.0).to(tl.float32)
    high = tl.full([PADDED_ROWS], float("-inf"), tl.float32)
    total = tl.full([PADDED_ROWS], 0.0, tl.float32)
    mixed = tl.full([PADDED_ROWS, PADDED_VALUE_WIDTH], 0.0, tl.float32)
    for begin in range(start, stop, TILE):
        position = begin + tl.arange(0, TILE)
        is_seen = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KEY_HEADS + head
        key = tl.load(
            keys + (place * WIDTH)[:, None] + column[None, :],
            mask=is_seen[:, None] & is_column[None, :],
            other=0.0,
        )
        value = tl.load(
            values + (place * VALUE_WIDTH)[:, None] + value_column[None, :],
            mask=is_seen[:, None] & is_value[None, :],
            other=0.0,
        )
        score = tl.full([PADDED_ROWS, TILE], 0.0, tl.float32)
        score = dot(query, tl.trans(key.to(query.dtype)), score) * scale
        if HAS_CAP:
            # tanh by an exponential that cannot overflow.
            small = tl.exp(-2.0 * tl.abs(score) / softcap)
            score = tl.where(score < 0, -softcap, softcap) * (1.0 - small) / (1.0 + small)
        if HAS_SLOPES:
            score += slope[:, None] * (position - newest)[None, :].to(tl.float32)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        higher = tl.maximum(high, tl.reduce(score, 1, _elementwise_max))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.reduce(weight, 1, _sum_combine)
        mixed = mixed * shrink[:, None]
        mixed = dot(rounded(weight, query.dtype), value.to(query.dtype), mixed)
        high = higher
    is_result = is_row[:, None] & is_value[None, :]
    if used_splits > 1:
        pair = request.to(tl.int64) * KEY_HEADS + head
        number = (pair * num_splits + split) * ROWS + row
        scratch = (number * VALUE_WIDTH)[:, None] + value_column[None, :]
        tl.store(sums + scratch, mixed, mask=is_result)
        tl.store(largest + number, high, mask=is_row)
        tl.store(totals + number, total, mask=is_row)
        # What all threads have stored comes before the arrival, and it before what is read below.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived < used_splits - 1:
            return
        tl.store(arrivals + pair, 0)
        high = tl.full([PADDED_ROWS], float("-inf"), tl.float32)
        total = tl.full([PADDED_ROWS], 0.0, tl.float32)
        mixed = tl.full([PADDED_ROWS, PADDED_VALUE_WIDTH], 0.0, tl.float32)
        for one in range(used_splits):
            number = (pair * num_splits + one) * ROWS + row
            scratch = (number * VALUE_WIDTH)[:, None] + value_column[None, :]
            # Past the first cache, which other processors do not write.
            own_high = tl.load(largest + number, mask=is_row, other=0.0, cache_modifier=".cg")
            own_total = tl.load(totals + number, mask=is_row, other=1.0, cache_modifier=".cg")
            own_mixed = tl.load(sums + scratch, mask=is_result, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(high, own_high)
            shrink, own_shrink = tl.exp(high - higher), tl.exp(own_high - higher)
            total = total * shrink + own_total * own_shrink
            mixed = mixed * shrink[:, None] + own_mixed * own_shrink[:, None]
            high = higher
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
        higher = tl.maximum(high, sink)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.exp(sink - higher)
        mixed = mixed * shrink[:, None]
    place = (request.to(tl.int64) * KEY_HEADS * ROWS + query_head) * VALUE_WIDTH
    found = rounded(mixed / total[:, None], out.dtype.element_ty)
    tl.store(out + place[:, None] + value_column[None, :], found, mask=is_result)
