"""Kernels of both chunked recurrences, forward. Importing this file imports Triton.

The gated delta rule and the state space of Mamba-2 differ by the correction alone: with it, a token
writes u = (1 + A)^-1 beta (v - e^c S^T k), and without it u = beta v, where beta is the time step.
`ops/gated_delta_rule.py` has the formulas and the names. All documents of a pack are in one launch:
a table of the host has the tokens of each chunk, and another one the chunks of each sequence.

Three launches: what is local to a chunk, for every chunk and head at once; the scan, a program for
each sequence, head and block of the state's columns, which are independent; and what queries read,
again for every chunk. Everything is computed in fp32, and products are as exact as torch's are.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, G key heads, H value heads, K key dim,
# V value dim

from __future__ import annotations

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import KERNEL_CHUNK
from pcomm.gdn_cp.ops.kernels.triton_pieces import (
    ChunkSizes,
    Recurrence,
    Tokens,
    decays_of,
    load_state,
    numbers_of,
    of_tokens,
    padded,
    pairwise,
    products_of,
    put,
    read_state,
    sequence_of,
    state_tile,
    store_state,
    tokens_of,
    written_by,
)

__all__ = [
    "Local",
    "Scanned",
    "chunk_kernel",
    "local_launch",
    "read_kernel",
    "read_launch",
    "scan_kernel",
    "scan_launch",
]

# Columns of a state for a program that reads, which does not wait for others as a scan does.
_READ_COLUMNS = 64


class Local(NamedTuple):
    """What is local to chunks.

    Args:
        decay_TH: `[T, H]` logarithm of the decay since the start of the chunk.
        inverse_MHCC: `[M, H, C, C]` inverse of each chunk's system; none without correction.
    """

    decay_TH: Tensor
    inverse_MHCC: Tensor | None


def local_launch(given: Recurrence) -> tuple[KernelLaunch, Local]:
    """Decays since the chunks began, and the inverse of their systems: chunks times heads."""
    num_chunks, num_heads = len(given.tables.chunks_M4), given.v_THV.shape[1]
    decay_TH = given.new(*given.g_TH.shape)
    inverse = (
        given.new(num_chunks, num_heads, KERNEL_CHUNK, KERNEL_CHUNK) if given.is_corrected else None
    )
    tokens: dict[str, Any] = {"beta": given.beta_TH}
    if given.is_corrected:
        tokens |= {"k": given.rows["k"]}
    own: dict[str, Any] = {"g": given.g_TH, "decay": decay_TH, "inverse": inverse}
    grid = (num_chunks, num_heads)
    launch = given.launch(chunk_kernel, grid, tokens, num_stages=3, **own)
    return launch, Local(decay_TH, inverse)


class Scanned(NamedTuple):
    """What a scan finds.

    Args:
        values_THV: `[T, H, V]` what tokens write; none without correction, where it is beta v.
        states_MHKV: `[M, H, K, V]` state that enters each chunk.
        final_NHKV: `[N, H, K, V]` state after each sequence.
    """

    values_THV: Tensor | None
    states_MHKV: Tensor
    final_NHKV: Tensor


def scan_launch(
    given: Recurrence, local: Local, initial_NHKV: Tensor | None
) -> tuple[KernelLaunch, Scanned]:
    """The states from chunk to chunk: sequences times heads times blocks of columns."""
    num_sequences, num_heads, key_dim, value_dim = given.state_shape
    states = given.new(len(given.tables.chunks_M4), num_heads, key_dim, value_dim)
    final = given.new(*given.state_shape)
    values = given.new(*given.v_THV.shape) if given.is_corrected else None
    columns = given.scan_columns
    launch = given.launch(
        scan_kernel,
        (num_sequences, num_heads, -(-value_dim // columns)),
        {"beta": given.beta_TH, "decay": local.decay_TH, "written": values}
        | {name: given.rows[name] for name in "kv"},
        sequences=given.tables.sequences_N4,
        inverse=local.inverse_MHCC,
        initial=initial_NHKV,
        states=states,
        final=final,
        BV=columns,
    )
    return launch, Scanned(values, states, final)


def read_launch(given: Recurrence, local: Local, scanned: Scanned) -> tuple[KernelLaunch, Tensor]:
    """What queries read, `[T, H, V]` in the dtype of the values: chunks, heads, columns."""
    _, num_heads, _, value_dim = given.state_shape
    output = given.v_THV.new_empty(given.v_THV.shape)
    columns = padded(value_dim, _READ_COLUMNS)
    launch = given.launch(
        read_kernel,
        (len(given.tables.chunks_M4), num_heads, -(-value_dim // columns)),
        given.rows
        | {"beta": given.beta_TH, "decay": local.decay_TH, "written": scanned.values_THV},
        states=scanned.states_MHKV,
        skip=given.skip_H,
        output=output,
        BV=columns,
    )
    return launch, output


# -- the kernels -----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def chunk_kernel(
    tokens: Tokens, sizes: ChunkSizes, g: tl.tensor, decay: tl.tensor, inverse: tl.tensor | None
) -> None:
    """The decay since the start of a chunk, and the inverse of 1 + A."""
    # The logarithm of the smallest number of fp32: minus infinity counts as that.
    LEAST: tl.constexpr = -103.27892990343184
    C: tl.constexpr = sizes.C
    chunk, head = tl.program_id(0), tl.program_id(1)
    at = tokens_of(tokens.chunks, chunk, C)
    of_head = numbers_of(at, head, sizes.H)
    logs = tl.load(g + of_head, mask=at.inside, other=0.0)
    # In fp64, as torch adds on a CPU: behind strong decays, weak ones would be rounded each time.
    c = tl.cumsum(tl.where(logs < LEAST, LEAST, logs).to(tl.float64), 0).to(tl.float32)
    tl.store(decay + of_head, c, mask=at.inside)
    if inverse is not None:
        products = products_of(tokens.k, tokens.k, at, head // (sizes.H // sizes.G), sizes)
        b = tl.load(tokens.beta + of_head, mask=at.inside, other=0.0)
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        a = tl.where(i > j, b[:, None] * products * pairwise(c, C), 0.0)
        # Blocks on the diagonal, twice as long each time. With X the inverse of two neighbours,
        # and L what lies below the first and left of the second, that of both is X - X L X.
        x = tl.where(i == j, 1.0, 0.0) - tl.where((i ^ j) == 1, a, 0.0)
        for level in range(1, 6):
            below = tl.where(((i ^ j) >> level) == 1, a, 0.0)
            before = tl.dot(x, below, input_precision=sizes.PRECISION)
            x -= tl.dot(before, x, input_precision=sizes.PRECISION)
        start = (chunk * sizes.H + head).to(tl.int64) * C * C
        tl.store(inverse + start + i * C + j, x)


@triton.jit  # type: ignore[untyped-decorator]
def scan_kernel(
    tokens: Tokens,
    sizes: ChunkSizes,
    sequences: tl.tensor,
    inverse: tl.tensor | None,
    initial: tl.tensor | None,
    states: tl.tensor,
    final: tl.tensor,
    BV: tl.constexpr,
) -> None:
    """The state that enters each chunk of a sequence, what tokens write, and the last state."""
    C: tl.constexpr = sizes.C
    head = tl.program_id(1)
    group = head // (sizes.H // sizes.G)
    first_chunk, num_chunks, of_sequence, columns = sequence_of(sequences, sizes, BV)
    state = load_state(initial, of_sequence, columns, sizes)
    for number in range(num_chunks):
        chunk = first_chunk + number
        of_chunk = (chunk * sizes.H + head).to(tl.int64)
        store_state(states, of_chunk, state, columns, sizes)
        at = tokens_of(tokens.chunks, chunk, C)
        c, end = decays_of(tokens.decay, at, head, sizes.H)
        b = tl.load(tokens.beta + numbers_of(at, head, sizes.H), mask=at.inside, other=0.0)
        new = of_tokens(tokens.v, at, head, columns, sizes.V)
        if inverse is not None:
            error = new - tl.exp(c)[:, None] * read_state(tokens.k, state, at, group, sizes)
            square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
            solver = tl.load(inverse + of_chunk * C * C + square)
            written = tl.dot(solver, b[:, None] * error, input_precision=sizes.PRECISION)
            put(tokens.written, at, head, columns, written, sizes.H, sizes.V)
        else:
            written = b[:, None] * new
        kept = tl.where(at.inside, tl.exp(end - c), 0.0)[:, None] * written
        later = ()
        for block in tl.static_range(sizes.BLOCKS):
            rows = tl.arange(0, sizes.BK) + block * sizes.BK
            keys = of_tokens(tokens.k, at, group, rows, sizes.K)
            added = tl.dot(tl.trans(keys), kept, input_precision=sizes.PRECISION)
            added += tl.exp(end) * state[block]
            later = later + (added,)  # type: ignore[assignment]  # noqa: RUF005
        state = later
    store_state(final, of_sequence, state, columns, sizes)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(
    tokens: Tokens,
    sizes: ChunkSizes,
    states: tl.tensor,
    skip: tl.tensor | None,
    output: tl.tensor,
    BV: tl.constexpr,
) -> None:
    """What the tokens of a chunk read from the state after their own write."""
    C: tl.constexpr = sizes.C
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (sizes.H // sizes.G)
    at = tokens_of(tokens.chunks, chunk, C)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    states += (chunk * sizes.H + head).to(tl.int64) * sizes.K * sizes.V
    scores, read = tl.zeros([C, C], tl.float32), tl.zeros([C, BV], tl.float32)
    for start in range(0, sizes.K, sizes.BK):
        rows = start + tl.arange(0, sizes.BK)
        queries = of_tokens(tokens.q, at, group, rows, sizes.K)
        keys = of_tokens(tokens.k, at, group, rows, sizes.K)
        scores += tl.dot(queries, tl.trans(keys), input_precision=sizes.PRECISION)
        place, in_state = state_tile(rows, columns, sizes)
        state = tl.load(states + place, mask=in_state, other=0.0)
        read += tl.dot(queries, state, input_precision=sizes.PRECISION)
    c, _ = decays_of(tokens.decay, at, head, sizes.H)
    b = tl.load(tokens.beta + numbers_of(at, head, sizes.H), mask=at.inside, other=0.0)
    written = written_by(tokens, b, at, head, columns, sizes)
    read *= tl.exp(c)[:, None]
    read += tl.dot(scores * pairwise(c, C), written, input_precision=sizes.PRECISION)
    if skip is not None:
        read += tl.load(skip + head) * of_tokens(tokens.v, at, head, columns, sizes.V)
    put(output, at, head, columns, read, sizes.H, sizes.V)
