"""Kernels of both chunked recurrences, backward. Importing this file imports Triton.

Decays, inverses, states and what tokens wrote are computed again by the kernels of the forward.
Then five launches: what gradients of the output mean for what was written, within each chunk; the
transposed scan, from the last chunk of a sequence to the first; everything that need not wait for
it, by chunk, in two; and sums over blocks of rows.

Here right = (1 + A)^-T du is the gradient of what is written solved backwards (without correction
right = du). The gradient of a token's decay is the sum of the terms that have passed it, each with
its decay: those of tokens j before it and i from it on, of i and the state that enters the chunk,
of j and the one that leaves it, and of both states. Differences of sums over i and over j, as in
arXiv 2312.06635, need no products of pairs, but where decays are strong nothing of them is right.
No atomics: a program adds up some value heads of its key head, one after the other, and torch what
several programs have.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, G key heads, H value heads, K key dim,
# V value dim, B blocks of rows of a state, S shares of the value heads of a key head

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.kernels.triton_chunks import Local, Scanned
from pcomm.gdn_cp.ops.kernels.triton_pieces import (
    ChunkSizes,
    Recurrence,
    Rows,
    Tokens,
    decays_of,
    load_state,
    numbers_of,
    of_tokens,
    of_values,
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
    "back_through_reads_kernel",
    "back_through_reads_launch",
    "back_through_scan_kernel",
    "back_through_scan_launch",
    "collect_kernel",
    "collect_launches",
    "finish_kernel",
    "finish_launch",
]

# Columns of a state for a program that goes back through reads, and for a step of one that
# collects.
_READ_COLUMNS, _COLUMNS = 64, 32
# Most value heads of one program that collects, one after the other.
_MOST_HEADS = 4


def back_through_reads_launch(
    given: Recurrence, local: Local, grad_THV: Tensor
) -> tuple[KernelLaunch, Tensor]:
    """`[T, H, V]`: what reads within its chunk bring to what each token wrote."""
    num_heads, value_dim = given.v_THV.shape[1:]
    grad_values = given.new(*given.v_THV.shape)
    columns = padded(value_dim, _READ_COLUMNS)
    tokens = {"decay": local.decay_TH, "grad": grad_THV}
    launch = given.launch(
        back_through_reads_kernel,
        (len(given.tables.chunks_M4), num_heads, -(-value_dim // columns)),
        tokens | {name: given.rows[name] for name in "kq"},
        grad_values=grad_values,
        BV=columns,
    )
    return launch, grad_values


class Back(NamedTuple):
    """What the transposed scan finds.

    Args:
        right_THV: `[T, H, V]` gradient of what is written, solved backwards.
        left_MHKV: `[M, H, K, V]` gradient of the state that leaves each chunk.
        initial_NHKV: `[N, H, K, V]` gradient of the state before each sequence.
    """

    right_THV: Tensor
    left_MHKV: Tensor
    initial_NHKV: Tensor


def back_through_scan_launch(
    given: Recurrence,
    local: Local,
    grad_values_THV: Tensor | None,
    grad_THV: Tensor | None,
    grad_final_NHKV: Tensor | None,
) -> tuple[KernelLaunch, Back]:
    """The gradients of states, chunk by chunk from the last; writes over `grad_values_THV`."""
    num_sequences, num_heads, key_dim, value_dim = given.state_shape
    left = given.new(len(given.tables.chunks_M4), num_heads, key_dim, value_dim)
    initial = given.new(*given.state_shape)
    right = given.new(*given.v_THV.shape) if grad_values_THV is None else grad_values_THV
    columns = given.scan_columns
    tokens = {"beta": given.beta_TH, "decay": local.decay_TH, "grad": grad_THV}
    launch = given.launch(
        back_through_scan_kernel,
        (num_sequences, num_heads, -(-value_dim // columns)),
        tokens | {name: x for name, x in given.rows.items() if name != "v"},
        sequences=given.tables.sequences_N4,
        inverse=local.inverse_MHCC,
        grad_final=grad_final_NHKV,
        right=right,
        left=left,
        initial=initial,
        BV=columns,
    )
    return launch, Back(right, left, initial)


class Collected(NamedTuple):
    """Gradients, in fp32 but that of the values.

    Args:
        q_STGK: `[S, T, G, K]`, by each share of the value heads; None if nothing is read.
        k_STGK: `[S, T, G, K]`.
        v_THV: `[T, H, V]` in the dtype of the values.
        decay_BTH: `[B, T, H]` of the logarithm of the decay, by each block of rows.
        beta_BTH: `[B, T, H]`.
        skip_TH: `[T, H]` of the weight of the values that are added; None without.
    """

    q_STGK: Tensor | None
    k_STGK: Tensor
    v_THV: Tensor
    decay_BTH: Tensor
    beta_BTH: Tensor
    skip_TH: Tensor | None


def collect_launches(
    given: Recurrence, local: Local, scanned: Scanned, back: Back, grad_THV: Tensor | None
) -> tuple[list[KernelLaunch], Collected]:
    """All gradients that need not wait: chunks, shares of the heads, and blocks of rows.

    First those by reads, if there are any; the second launch adds the others. One launch for all
    would have more in its registers than there are.
    """
    num_tokens, num_groups, _ = given.k_TGK.shape
    num_heads, value_dim = given.v_THV.shape[1:]
    num_blocks, reads, repeats = given.num_blocks, grad_THV is not None, num_heads // num_groups
    num_shares = repeats // max(n for n in range(1, _MOST_HEADS + 1) if repeats % n == 0)
    collected = Collected(
        given.new(num_shares, *given.k_TGK.shape) if reads else None,
        given.new(num_shares, *given.k_TGK.shape),
        given.v_THV.new_empty(given.v_THV.shape),
        given.new(num_blocks, num_tokens, num_heads),
        given.new(num_blocks, num_tokens, num_heads),
        given.new(num_tokens, num_heads) if reads and given.skip_H is not None else None,
    )
    tokens = {"beta": given.beta_TH, "decay": local.decay_TH, "written": scanned.values_THV}
    collecting = partial(
        given.launch,
        collect_kernel,
        (len(given.tables.chunks_M4), num_groups * num_shares, num_blocks),
        given.rows | tokens | {"grad": grad_THV},
        num_warps=8,
        right=back.right_THV,
        states=scanned.states_MHKV,
        left=back.left_MHKV,
        grad_q=collected.q_STGK,
        grad_k=collected.k_STGK,
        grad_v=collected.v_THV,
        grad_decay=collected.decay_BTH,
        grad_beta=collected.beta_BTH,
        grad_skip=collected.skip_TH,
        num_tokens=num_tokens,
        BV=padded(value_dim, _COLUMNS),
        HEADS=repeats // num_shares,
    )
    skip = None if collected.skip_TH is None else given.skip_H
    others = collecting(skip=skip, READS=False, ADDS=reads)
    by_reads = collecting(skip=None, READS=True, ADDS=False) if reads else None
    return [others] if by_reads is None else [by_reads, others], collected


def finish_launch(
    given: Recurrence, collected: Collected
) -> tuple[KernelLaunch, tuple[Tensor, Tensor]]:
    """`[T, H]` gradients of `g` and `beta`, fp32: chunks times heads."""
    _, num_tokens, num_heads = collected.decay_BTH.shape
    grad_g, grad_beta = given.new(num_tokens, num_heads), given.new(num_tokens, num_heads)
    launch = given.launch(
        finish_kernel,
        (len(given.tables.chunks_M4), num_heads),
        {},
        g=given.g_TH,
        decays=collected.decay_BTH,
        betas=collected.beta_BTH,
        grad_g=grad_g,
        grad_beta=grad_beta,
        num_tokens=num_tokens,
    )
    return launch, (grad_g, grad_beta)


# -- the kernels -----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def back_through_reads_kernel(
    tokens: Tokens, sizes: ChunkSizes, grad_values: tl.tensor, BV: tl.constexpr
) -> None:
    """The transposed scores times the gradients of what was read."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    at = tokens_of(tokens.chunks, chunk, sizes.C)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    # Transposed: the rows are the tokens that wrote.
    scores = products_of(tokens.k, tokens.q, at, head // (sizes.H // sizes.G), sizes)
    c, _ = decays_of(tokens.decay, at, head, sizes.H)
    arriving = of_values(tokens.grad, at, head, columns, sizes)
    scores *= tl.trans(pairwise(c, sizes.C))
    found = tl.dot(scores, arriving, input_precision=sizes.PRECISION)
    put(grad_values, at, head, columns, found, sizes.H, sizes.V)


@triton.jit  # type: ignore[untyped-decorator]
def back_through_scan_kernel(
    tokens: Tokens,
    sizes: ChunkSizes,
    sequences: tl.tensor,
    inverse: tl.tensor | None,
    grad_final: tl.tensor | None,
    right: tl.tensor,
    left: tl.tensor,
    initial: tl.tensor,
    BV: tl.constexpr,
) -> None:
    """The gradient of the state that leaves each chunk, and of what its tokens write."""
    C: tl.constexpr = sizes.C
    head = tl.program_id(1)
    group = head // (sizes.H // sizes.G)
    first_chunk, num_chunks, of_sequence, columns = sequence_of(sequences, sizes, BV)
    state = load_state(grad_final, of_sequence, columns, sizes)
    for number in range(num_chunks):
        chunk = first_chunk + num_chunks - 1 - number
        of_chunk = (chunk * sizes.H + head).to(tl.int64)
        store_state(left, of_chunk, state, columns, sizes)
        at = tokens_of(tokens.chunks, chunk, C)
        c, end = decays_of(tokens.decay, at, head, sizes.H)
        found = read_state(tokens.k, state, at, group, sizes)
        found *= tl.where(at.inside, tl.exp(end - c), 0.0)[:, None]
        if tokens.grad is not None:
            found += of_values(right, at, head, columns, sizes)
        if inverse is not None:
            square = tl.arange(0, C)[None, :] * C + tl.arange(0, C)[:, None]
            solver = tl.load(inverse + of_chunk * C * C + square)
            found = tl.dot(solver, found, input_precision=sizes.PRECISION)
        put(right, at, head, columns, found, sizes.H, sizes.V)
        later = ()
        for block in tl.static_range(sizes.BLOCKS):
            rows = tl.arange(0, sizes.BK) + block * sizes.BK
            entering = tl.exp(end) * state[block]
            if tokens.grad is not None:
                queries = of_tokens(tokens.q, at, group, rows, sizes.K)
                arriving = of_values(tokens.grad, at, head, columns, sizes)
                arriving *= tl.exp(c)[:, None]
                entering += tl.dot(tl.trans(queries), arriving, input_precision=sizes.PRECISION)
            if inverse is not None:
                keys = of_tokens(tokens.k, at, group, rows, sizes.K)
                b = tl.load(tokens.beta + numbers_of(at, head, sizes.H), mask=at.inside, other=0.0)
                known = (tl.exp(c) * b)[:, None] * found
                entering -= tl.dot(tl.trans(keys), known, input_precision=sizes.PRECISION)
            later = later + (entering,)  # type: ignore[assignment]  # noqa: RUF005
        state = later
    store_state(initial, of_sequence, state, columns, sizes)


class Head(NamedTuple):
    """A value head of a chunk, and the rows of its state that a program collects for.

    Args:
        at: Tokens of the chunk.
        group: Number of the key head.
        head: Number of the value head.
        rows: Rows of the state.
        b: Beta of each token.
        c: Logarithm of the decay from the start of the chunk to each token.
        end: The same to the end of the chunk.
        products: `[C, C]` of queries i and keys j for reads, of keys of both for the correction:
            a sum over these rows of the state.
    """

    at: Any
    group: Any
    head: Any
    rows: Any
    b: Any
    c: Any
    end: Any
    products: Any


@triton.jit  # type: ignore[untyped-decorator]
def collect_kernel(
    tokens: Tokens,
    sizes: ChunkSizes,
    right: tl.tensor,
    states: tl.tensor,
    left: tl.tensor,
    skip: tl.tensor | None,
    grad_q: tl.tensor | None,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    grad_decay: tl.tensor,
    grad_beta: tl.tensor,
    grad_skip: tl.tensor | None,
    num_tokens: tl.tensor,
    BV: tl.constexpr,
    HEADS: tl.constexpr,
    READS: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """The gradients of a chunk, for a block of rows of the states of some heads of a key head.

    With READS those by reads, else all others; with ADDS to what is there.
    """
    C: tl.constexpr = sizes.C
    SHARES: tl.constexpr = sizes.H // sizes.G // HEADS
    chunk, block = tl.program_id(0), tl.program_id(2)
    group, share = tl.program_id(1) // SHARES, tl.program_id(1) % SHARES
    at = tokens_of(tokens.chunks, chunk, C)
    rows = tl.arange(0, sizes.BK) + block * sizes.BK
    of_share = share.to(tl.int64) * num_tokens * (sizes.G * sizes.K)
    grad_k += of_share
    total_q = tl.zeros([C, sizes.BK], tl.float32)
    total_k = tl.zeros([C, sizes.BK], tl.float32)
    if ADDS:
        total_k = of_tokens(Rows(grad_k, sizes.G * sizes.K), at, group, rows, sizes.K)
    products = None
    if READS or sizes.CORRECTED:
        keys = of_tokens(tokens.k, at, group, rows, sizes.K)
        others = of_tokens(tokens.q, at, group, rows, sizes.K) if READS else keys
        products = tl.dot(others, tl.trans(keys), input_precision=sizes.PRECISION)
    of_block = block.to(tl.int64) * num_tokens * sizes.H
    # Not unrolled: what several heads load at once would not fit in registers.
    for number in range(HEADS):
        head = group * (sizes.H // sizes.G) + share * HEADS + number
        of_head = numbers_of(at, head, sizes.H)
        of_state = (chunk * sizes.H + head).to(tl.int64) * sizes.K * sizes.V
        c, end = decays_of(tokens.decay, at, head, sizes.H)
        b = tl.load(tokens.beta + of_head, mask=at.inside, other=0.0)
        of = Head(at, group, head, rows, b, c, end, products)
        if READS:
            to_q, to_k, to_decay = _by_reads(tokens, sizes, of, states + of_state, BV)
            total_q += to_q
        else:
            to_k, to_decay, to_beta, skipped = _by_writes(
                tokens, sizes, of, right, states + of_state, left + of_state, skip, grad_v, block,
                BV,
            )  # fmt: skip
            tl.store(grad_beta + of_block + of_head, to_beta, mask=at.inside)
            if skip is not None:  # noqa: SIM102
                if block == 0:
                    tl.store(grad_skip + of_head, skipped, mask=at.inside)
        total_k += to_k
        if ADDS:
            to_decay += tl.load(grad_decay + of_block + of_head, mask=at.inside, other=0.0)
        tl.store(grad_decay + of_block + of_head, to_decay, mask=at.inside)
    if READS:
        put(grad_q + of_share, at, group, rows, total_q, sizes.G, sizes.K)
    put(grad_k, at, group, rows, total_k, sizes.G, sizes.K)


@triton.jit  # type: ignore[untyped-decorator]
def _by_reads(
    tokens: Tokens, sizes: ChunkSizes, of: Head, states: tl.tensor, BV: tl.constexpr
) -> tl.tuple:
    """What queries get of a value head, keys for it, and the decay."""
    read_from = tl.zeros([sizes.C, sizes.BK], tl.float32)
    for start in range(0, sizes.V, BV):
        columns = start + tl.arange(0, BV)
        arriving = of_values(tokens.grad, of.at, of.head, columns, sizes)
        place, in_state = state_tile(of.rows, columns, sizes)
        state = tl.load(states + place, mask=in_state, other=0.0)
        read_from += tl.dot(arriving, tl.trans(state), input_precision=sizes.PRECISION)
    read_by = _with_written(tokens.grad, tokens, sizes, of, BV) * pairwise(of.c, sizes.C)
    keys = of_tokens(tokens.k, of.at, of.group, of.rows, sizes.K)
    queries = of_tokens(tokens.q, of.at, of.group, of.rows, sizes.K)
    to_q = tl.exp(of.c)[:, None] * read_from
    started = tl.sum(queries * to_q, 1)
    to_q += tl.dot(read_by, keys, input_precision=sizes.PRECISION)
    to_k = tl.dot(tl.trans(read_by), queries, input_precision=sizes.PRECISION)
    nothing = tl.zeros([sizes.C], tl.float32)
    return to_q, to_k, _passed(read_by * of.products, started, nothing)


@triton.jit  # type: ignore[untyped-decorator]
def _with_written(
    given: tl.tensor, tokens: Tokens, sizes: ChunkSizes, of: Head, BV: tl.constexpr
) -> tl.tensor:
    """`[C, C]` products of rows i of a tensor like the values and what tokens j wrote.

    A loop of its own: with more products in it, Blackwell's tensor memory would not suffice.
    """
    pairs = tl.zeros([sizes.C, sizes.C], tl.float32)
    for start in range(0, sizes.V, BV):
        columns = start + tl.arange(0, BV)
        row = of_values(given, of.at, of.head, columns, sizes)
        written = written_by(tokens, of.b, of.at, of.head, columns, sizes)
        pairs += tl.dot(row, tl.trans(written), input_precision=sizes.PRECISION)
    return pairs


@triton.jit  # type: ignore[untyped-decorator]
def _passed(pairs: tl.tensor, started: tl.tensor, ending: tl.tensor) -> tl.tensor:
    """`[C]`, the sum of the terms that have passed the decay of each token.

    Args:
        pairs: `[C, C]` terms that decayed from token j to token i.
        started: `[C]` terms that decayed from the start of the chunk to token i.
        ending: `[C]` terms that decayed from token j to the end of the chunk.
    """
    token, other = tl.arange(0, pairs.shape[0])[:, None], tl.arange(0, pairs.shape[0])[None, :]
    from_each = tl.cumsum(pairs, 0, reverse=True) + ending[None, :]
    return tl.sum(tl.where(other < token, from_each, started[None, :]), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _by_writes(
    tokens: Tokens,
    sizes: ChunkSizes,
    of: Head,
    right: tl.tensor,
    states: tl.tensor,
    left: tl.tensor,
    skip: tl.tensor | None,
    grad_v: tl.tensor,
    block: tl.tensor,
    BV: tl.constexpr,
) -> tl.tuple:
    """What keys of a value head get by what was written and by what was known.

    Returns:
        That, and what the decay, beta and the weight of the values get; values get theirs here.
    """
    C: tl.constexpr = sizes.C
    known_to = tl.zeros([C, sizes.BK], tl.float32)
    leaving, kept = tl.zeros([C, sizes.BK], tl.float32), tl.zeros([sizes.BK], tl.float32)
    solved, skipped = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, sizes.V, BV):
        columns = start + tl.arange(0, BV)
        new = of_tokens(tokens.v, of.at, of.head, columns, sizes.V)
        back = of_values(right, of.at, of.head, columns, sizes)
        written = written_by(tokens, of.b, of.at, of.head, columns, sizes)
        place, in_state = state_tile(of.rows, columns, sizes)
        state = tl.load(states + place, mask=in_state, other=0.0)
        after = tl.load(left + place, mask=in_state, other=0.0)
        leaving += tl.dot(written, tl.trans(after), input_precision=sizes.PRECISION)
        if sizes.CORRECTED:
            known_to += tl.dot(back, tl.trans(state), input_precision=sizes.PRECISION)
        kept += tl.sum(state * after, 1)
        if block == 0:
            solved += tl.sum(back * new, 1)
            to_new = of.b[:, None] * back
            if skip is not None:
                arriving = of_values(tokens.grad, of.at, of.head, columns, sizes)
                to_new += tl.load(skip + of.head) * arriving
                skipped += tl.sum(arriving * new, 1)
            put(grad_v, of.at, of.head, columns, to_new, sizes.H, sizes.V)
    keys = of_tokens(tokens.k, of.at, of.group, of.rows, sizes.K)
    to_k = tl.where(of.at.inside, tl.exp(of.end - of.c), 0.0)[:, None] * leaving
    ending = tl.sum(keys * to_k, 1)
    below = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
    if sizes.CORRECTED:
        in_system = _with_written(right, tokens, sizes, of, BV)
        in_system = tl.where(below, -in_system * pairwise(of.c, C), 0.0)
        later = -tl.exp(of.c)[:, None] * known_to
        started = of.b * tl.sum(keys * later, 1)
        later += tl.dot(in_system, keys, input_precision=sizes.PRECISION)
        solved += tl.sum(keys * later, 1)
        to_k += of.b[:, None] * later
        in_system *= of.b[:, None]
        to_k += tl.dot(tl.trans(in_system), keys, input_precision=sizes.PRECISION)
        to_decay = _passed(in_system * of.products, started, ending)
    else:
        to_decay = tl.sum(tl.where(below, ending[None, :], 0.0), 1)
    # And what the state that leaves has of the one that enters.
    to_decay += tl.exp(of.end) * tl.sum(kept)
    return to_k, to_decay, solved, skipped


@triton.jit  # type: ignore[untyped-decorator]
def finish_kernel(
    tokens: Tokens,
    sizes: ChunkSizes,
    g: tl.tensor,
    decays: tl.tensor,
    betas: tl.tensor,
    grad_g: tl.tensor,
    grad_beta: tl.tensor,
    num_tokens: tl.tensor,
) -> None:
    """Sums over blocks of rows."""
    # See `chunk_kernel`: below it a decay gets nothing.
    LEAST: tl.constexpr = -103.27892990343184
    C: tl.constexpr = sizes.C
    chunk, head = tl.program_id(0), tl.program_id(1)
    at = tokens_of(tokens.chunks, chunk, C)
    of_head = numbers_of(at, head, sizes.H)
    decay, beta = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for block in tl.static_range(sizes.BLOCKS):
        place = (block * num_tokens + at.first) * sizes.H + head + tl.arange(0, C) * sizes.H
        decay += tl.load(decays + place, mask=at.inside, other=0.0)
        beta += tl.load(betas + place, mask=at.inside, other=0.0)
    logs = tl.load(g + of_head, mask=at.inside, other=0.0)
    tl.store(grad_g + of_head, tl.where(logs < LEAST, 0.0, decay), mask=at.inside)
    tl.store(grad_beta + of_head, beta, mask=at.inside)
