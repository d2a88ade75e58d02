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

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.attention.scores import PLAIN, Softmax
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.attention.turn_kernel import New, Shape, Turn, keep, turned_queries
from pcomm.inference.kernel_arithmetic import DTYPES, dot, rounded
from pcomm.inference.model import KVMemory

__all__ = ["decode_kernel", "decode_launch", "takes"]

# Keys of a split, as long as there are no more than so many splits; keys of a step of its loop.
_SPLIT, _MOST_SPLITS, _TILE = 256, 64, 64
# Fewest rows and columns of a matrix that the tensor cores multiply.
_LEAST = 16
# Widest key or value, so that a tile of both and the sums fit in the registers and shared memory.
_MOST_WIDTH = 256
# Largest tile of the queries that read one key head, in bytes: with twice as many, Hopper has too
# little shared memory.
_MOST_QUERIES = 64 << 10


def takes(q_NHK: Tensor, memory: KVMemory) -> bool:
    """Whether the kernel computes such layers."""
    width = max(memory.keys.shape[3], memory.values.shape[3])
    if q_NHK.dtype not in DTYPES or memory.keys.dtype not in DTYPES or width > _MOST_WIDTH:
        return False
    rows = triton.next_power_of_2(q_NHK.shape[1] // memory.keys.shape[2])
    queries: int = rows * triton.next_power_of_2(width) * q_NHK.element_size()
    return queries <= _MOST_QUERIES


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
    q_NHK, (tables_NB, contexts_N) = new[0], places
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
    told = New.of(*new)
    arguments = {
        "new": told,
        "turn": Turn.of(turn),
        "shape": Shape.of(told, _LEAST),
        "keys": memory.keys,
        "values": memory.values,
        "tables": tables_NB,
        "table_width": tables_NB.shape[1],
        "contexts": contexts_N,
        "weights": Weights(scale, softmax.softcap, softmax.sinks_H, softmax.alibi_H, window),
        "scratch": Scratch(sums, stats[0], stats[1], arrivals, num_splits),
        "out": out_NHV,
        "BLOCK_SIZE": block_size,
        "TILE": _TILE,
        "SPLIT": _SPLIT,
        "MOST_SPLITS": _MOST_SPLITS,
    }
    grid = (num_requests, key_heads, num_splits)
    return KernelLaunch(decode_kernel, grid, arguments, q_NHK.device)


# -- the kernel ------------------------------------------------------------------------------


class Weights(NamedTuple):
    """How scores become weights, and how many keys a token sees; None for what does nothing."""

    scale: Any
    softcap: Any
    sinks: Any
    slopes: Any
    window: Any


class Scratch(NamedTuple):
    """What splits leave: sums of values, largest scores, sums of weights, and how many arrived."""

    sums: Any
    largest: Any
    totals: Any
    arrivals: Any
    num_splits: Any


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(
    new: New,
    turn: Turn,
    shape: Shape,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    table_width: tl.tensor,
    contexts: tl.tensor,
    weights: Weights,
    scratch: Scratch,
    out: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
) -> None:
    """One split of one key head of one request; the last to arrive adds up all of them."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    newest = tl.load(contexts + request)
    first = newest * 0
    if weights.window is not None:
        first = tl.maximum(newest + 1 - weights.window, 0)
    num_keys = newest + 1 - first
    # By the keys of this request alone.
    own_part = ((num_keys + MOST_SPLITS - 1) // MOST_SPLITS + TILE - 1) // TILE * TILE
    part = tl.maximum(own_part, SPLIT)
    used_splits = (num_keys + part - 1) // part
    if split >= used_splits:
        return
    start = first + split * part
    stop = tl.minimum(start + part, newest + 1)
    table = tables + request.to(tl.int64) * table_width
    if stop > newest:
        block = tl.load(table + newest // BLOCK_SIZE).to(tl.int64)
        place = (block * BLOCK_SIZE + newest % BLOCK_SIZE) * shape.KEY_HEADS + head
        keep(new, turn, shape, keys, values, request, head, place)
        # All threads of the program read it below.
        tl.debug_barrier()
    query = turned_queries(new, turn, shape, request, head)
    high, total, mixed = _attended(
        query, keys, values, table, start, stop, newest, head, weights, shape, BLOCK_SIZE, TILE
    )
    pair = request.to(tl.int64) * shape.KEY_HEADS + head
    if used_splits > 1:
        place = (pair * scratch.num_splits + split) * shape.ROWS
        _leave(scratch, place, high, total, mixed, shape)
        # What all threads have stored comes before the arrival, and it before what is read below.
        tl.debug_barrier()
        arrived = tl.atomic_add(scratch.arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived < used_splits - 1:
            return
        tl.store(scratch.arrivals + pair, 0)
        high, total, mixed = _all_splits(scratch, pair, used_splits, shape)
    row, column = tl.arange(0, shape.PADDED_ROWS), tl.arange(0, shape.PADDED_VALUE_WIDTH)
    is_row = row < shape.ROWS
    if weights.sinks is not None:
        sink = tl.load(weights.sinks + head * shape.ROWS + row, mask=is_row, other=0.0)
        sink = sink.to(tl.float32)
        higher = tl.maximum(high, sink)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.exp(sink - higher)
        mixed = mixed * shrink[:, None]
    place = (pair * shape.ROWS + row) * shape.VALUE_WIDTH
    found = rounded(mixed / total[:, None], out.dtype.element_ty)
    is_result = is_row[:, None] & (column < shape.VALUE_WIDTH)[None, :]
    tl.store(out + place[:, None] + column[None, :], found, mask=is_result)


@triton.jit  # type: ignore[untyped-decorator]
def _nothing(shape: Shape) -> Any:
    """The largest score, the sum of weights and that of weighted values before the first key."""
    high = tl.full([shape.PADDED_ROWS], float("-inf"), tl.float32)
    total = tl.full([shape.PADDED_ROWS], 0.0, tl.float32)
    return high, total, tl.full([shape.PADDED_ROWS, shape.PADDED_VALUE_WIDTH], 0.0, tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _attended(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    newest: tl.tensor,
    head: tl.tensor,
    weights: Weights,
    shape: Shape,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Sums over the keys from `start` to `stop`, a tile of them at a time."""
    row = tl.arange(0, shape.PADDED_ROWS)
    column, value_column = tl.arange(0, shape.PADDED_WIDTH), tl.arange(0, shape.PADDED_VALUE_WIDTH)
    is_column, is_value = column < shape.WIDTH, value_column < shape.VALUE_WIDTH
    slope = tl.full([shape.PADDED_ROWS], 0.0, tl.float32)
    if weights.slopes is not None:
        slope = tl.load(
            weights.slopes + head * shape.ROWS + row, mask=row < shape.ROWS, other=0.0
        ).to(tl.float32)
    high, total, mixed = _nothing(shape)
    for begin in range(start, stop, TILE):
        position = begin + tl.arange(0, TILE)
        is_seen = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * shape.KEY_HEADS + head
        key = tl.load(
            keys + (place * shape.WIDTH)[:, None] + column[None, :],
            mask=is_seen[:, None] & is_column[None, :],
            other=0.0,
        )
        value = tl.load(
            values + (place * shape.VALUE_WIDTH)[:, None] + value_column[None, :],
            mask=is_seen[:, None] & is_value[None, :],
            other=0.0,
        )
        score = tl.full([shape.PADDED_ROWS, TILE], 0.0, tl.float32)
        score = dot(query, tl.trans(key.to(query.dtype)), score) * weights.scale
        if weights.softcap is not None:
            # tanh by an exponential that cannot overflow.
            small = tl.exp(-2.0 * tl.abs(score) / weights.softcap)
            most = tl.where(score < 0, -weights.softcap, weights.softcap)
            score = most * (1.0 - small) / (1.0 + small)
        if weights.slopes is not None:
            score += slope[:, None] * (position - newest)[None, :].to(tl.float32)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        higher = tl.maximum(high, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None]
        mixed = dot(rounded(weight, query.dtype), value.to(query.dtype), mixed)
        high = higher
    return high, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _leave(
    scratch: Scratch,
    place: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    shape: Shape,
) -> None:
    """Write the sums of a split."""
    row, column = tl.arange(0, shape.PADDED_ROWS), tl.arange(0, shape.PADDED_VALUE_WIDTH)
    is_row, number = row < shape.ROWS, place + row
    at = (number * shape.VALUE_WIDTH)[:, None] + column[None, :]
    is_result = is_row[:, None] & (column < shape.VALUE_WIDTH)[None, :]
    tl.store(scratch.sums + at, mixed, mask=is_result)
    tl.store(scratch.largest + number, high, mask=is_row)
    tl.store(scratch.totals + number, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _all_splits(scratch: Scratch, pair: tl.tensor, used_splits: tl.tensor, shape: Shape) -> Any:
    """The sums of all splits of a request and head, in their order."""
    row, column = tl.arange(0, shape.PADDED_ROWS), tl.arange(0, shape.PADDED_VALUE_WIDTH)
    is_row = row < shape.ROWS
    is_result = is_row[:, None] & (column < shape.VALUE_WIDTH)[None, :]
    high, total, mixed = _nothing(shape)
    for one in range(used_splits):
        number = (pair * scratch.num_splits + one) * shape.ROWS + row
        at = (number * shape.VALUE_WIDTH)[:, None] + column[None, :]
        # Past the first cache, which other processors do not write.
        own_high = tl.load(scratch.largest + number, mask=is_row, other=0.0, cache_modifier=".cg")
        own_total = tl.load(scratch.totals + number, mask=is_row, other=1.0, cache_modifier=".cg")
        own_mixed = tl.load(scratch.sums + at, mask=is_result, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(high, own_high)
        shrink, own_shrink = tl.exp(high - higher), tl.exp(own_high - higher)
        total = total * shrink + own_total * own_shrink
        mixed = mixed * shrink[:, None] + own_mixed * own_shrink[:, None]
        high = higher
    return high, total, mixed
