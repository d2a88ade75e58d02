"""Kernels of both chunked recurrences, backward. Importing this file imports Triton.

Decays, inverses, states and what tokens wrote are computed again by the kernels of the forward.
Then five launches: what gradients of the output mean for what was written, within each chunk; the
transposed scan, from the last chunk of a sequence to the first; everything that need not wait for
it, by chunk, in two; and sums over blocks of rows and over later tokens, which the decays get.

With right = (1 + A)^-T du, the gradient of what is written solved backwards (without correction
right = du), the gradient of a decay needs no product of its own:
  dc_i = q_i dq_i + beta_i k_i (dk_i by the system and by what was known) - right_i u_i,
and the last token of a chunk gets what the state that leaves has lost. No atomics: a program adds
up some value heads of its key head, one after the other, and torch what several programs have.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, G key heads, H value heads, K key dim,
# V value dim, B blocks of rows of a state, S shares of the value heads of a key head

from __future__ import annotations

from typing import NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.kernels.triton_chunks import (
    Local,
    Recurrence,
    Scanned,
    decays_of,
    load_state,
    of_tokens,
    padded,
    pairwise,
    put,
    store_state,
    tokens_of,
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

# Columns of a state for a program of the transposed scan, for one that goes back through reads, and
# at a time for one that collects.
_SCAN_COLUMNS, _READ_COLUMNS, _COLUMNS = 32, 64, 32
# Most value heads of one program that collects, one after the other.
_MOST_HEADS = 4


def back_through_reads_launch(
    given: Recurrence, local: Local, grad_THV: Tensor
) -> tuple[KernelLaunch, Tensor]:
    """`[T, H, V]`: what reads within its chunk bring to what each token wrote."""
    num_heads, value_dim = given.v_THV.shape[1:]
    grad_values = given.new(*given.v_THV.shape)
    columns = padded(value_dim, _READ_COLUMNS)
    arguments = given.arguments | given.queries | {
        "decay": local.decay_TH,
        "grad": grad_THV,
        "grad_values": grad_values,
        **given.sizes,
        "BV": columns,
    }  # fmt: skip
    for name in ("v", "v_row", "beta", "CORRECTED"):
        del arguments[name]
    grid = (len(given.tables.chunks_M4), num_heads, -(-value_dim // columns))
    options = {"num_warps": 4, "num_stages": 1}
    kernel = back_through_reads_kernel
    return KernelLaunch(kernel, grid, arguments, grad_THV.device, options), grad_values


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
    columns = padded(value_dim, _SCAN_COLUMNS)
    arguments = given.arguments | given.queries | {
        "decay": local.decay_TH,
        "inverse": local.decay_TH if local.inverse_MHCC is None else local.inverse_MHCC,
        "grad": right if grad_THV is None else grad_THV,
        "grad_final": initial if grad_final_NHKV is None else grad_final_NHKV,
        "right": right,
        "left": left,
        "initial": initial,
        "sequences": given.tables.sequences_N4,
        **given.sizes,
        "BLOCKS": -(-key_dim // given.sizes["BK"]),
        "BV": columns,
        "READS": grad_THV is not None,
        "HAS_FINAL": grad_final_NHKV is not None,
    }  # fmt: skip
    for name in ("v", "v_row"):
        del arguments[name]
    grid = (num_sequences, num_heads, -(-value_dim // columns))
    options = {"num_warps": 4, "num_stages": 1}
    launch = KernelLaunch(back_through_scan_kernel, grid, arguments, left.device, options)
    return launch, Back(right, left, initial)


class Collected(NamedTuple):
    """Gradients, in fp32 but that of the values.

    Args:
        q_STGK: `[S, T, G, K]`, by each share of the value heads; None if nothing is read.
        k_STGK: `[S, T, G, K]`.
        v_THV: `[T, H, V]` in the dtype of the values.
        decay_BTH: `[B, T, H]` of the decay since the start of the chunk, by each block of rows.
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
    num_tokens, num_groups, key_dim = given.k_TGK.shape
    num_heads, value_dim = given.v_THV.shape[1:]
    num_blocks = -(-key_dim // given.sizes["BK"])
    reads, repeats = grad_THV is not None, num_heads // num_groups
    num_shares = repeats // max(n for n in range(1, _MOST_HEADS + 1) if repeats % n == 0)
    collected = Collected(
        given.new(num_shares, *given.k_TGK.shape) if reads else None,
        given.new(num_shares, *given.k_TGK.shape),
        given.v_THV.new_empty(given.v_THV.shape),
        given.new(num_blocks, num_tokens, num_heads),
        given.new(num_blocks, num_tokens, num_heads),
        given.new(num_tokens, num_heads) if reads and given.skip_H is not None else None,
    )
    values = back.right_THV if scanned.values_THV is None else scanned.values_THV
    arguments = given.arguments | given.queries | {
        "decay": local.decay_TH,
        "grad": back.right_THV if grad_THV is None else grad_THV,
        "values": values,
        "right": back.right_THV,
        "states": scanned.states_MHKV,
        "left": back.left_MHKV,
        "skip": local.decay_TH if given.skip_H is None else given.skip_H,
        "grad_q": collected.k_STGK if collected.q_STGK is None else collected.q_STGK,
        "grad_k": collected.k_STGK,
        "grad_v": collected.v_THV,
        "grad_decay": collected.decay_BTH,
        "grad_beta": collected.beta_BTH,
        "grad_skip": local.decay_TH if collected.skip_TH is None else collected.skip_TH,
        "num_tokens": num_tokens,
        **given.sizes,
        "BV": padded(value_dim, _COLUMNS),
        "HEADS": num_heads // num_groups // num_shares,
    }  # fmt: skip
    by_reads = {"READS": True, "WRITES": False, "ADDS": False, "SKIPS": False}
    others = {"READS": False, "WRITES": True, "ADDS": reads, "SKIPS": collected.skip_TH is not None}
    grid = (len(given.tables.chunks_M4), num_groups * num_shares, num_blocks)
    options, device = {"num_warps": 8, "num_stages": 1}, back.left_MHKV.device
    launches = [
        KernelLaunch(collect_kernel, grid, arguments | parts, device, options)
        for parts in ([by_reads, others] if reads else [others])
    ]
    return launches, collected


def finish_launch(
    given: Recurrence, collected: Collected
) -> tuple[KernelLaunch, tuple[Tensor, Tensor]]:
    """`[T, H]` gradients of `g` and `beta`, fp32: chunks times heads."""
    num_blocks, num_tokens, num_heads = collected.decay_BTH.shape
    grad_g, grad_beta = given.new(num_tokens, num_heads), given.new(num_tokens, num_heads)
    arguments = {
        "chunks": given.tables.chunks_M4,
        "g": given.g_TH,
        "decays": collected.decay_BTH,
        "betas": collected.beta_BTH,
        "grad_g": grad_g,
        "grad_beta": grad_beta,
        "num_tokens": num_tokens,
        "C": given.sizes["C"],
        "H": num_heads,
        "BLOCKS": num_blocks,
    }
    grid = (len(given.tables.chunks_M4), num_heads)
    launch = KernelLaunch(finish_kernel, grid, arguments, grad_g.device, {"num_warps": 4})
    return launch, (grad_g, grad_beta)


# -- the kernels -----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def back_through_reads_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    chunks: tl.tensor,
    q: tl.tensor,
    q_row: tl.tensor,
    decay: tl.tensor,
    grad: tl.tensor,
    grad_values: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
) -> None:
    """The transposed scores times the gradients of what was read."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, inside, last = tokens_of(chunks, chunk, C)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    # Transposed: the rows are the tokens that wrote.
    scores = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BK):
        rows = start + tl.arange(0, BK)
        queries = of_tokens(q, q_row, first, inside, head // (H // G), rows, K)
        keys = of_tokens(k, k_row, first, inside, head // (H // G), rows, K)
        scores += tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    c, _ = decays_of(decay, first, inside, last, head, H)
    arriving = of_tokens(grad, H * V, first, inside, head, columns, V)
    scores *= tl.trans(pairwise(c, C))
    found = tl.dot(scores, arriving, input_precision=PRECISION)
    put(grad_values, first, inside, head, columns, found, H, V)


@triton.jit  # type: ignore[untyped-decorator]
def back_through_scan_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    q: tl.tensor,
    q_row: tl.tensor,
    decay: tl.tensor,
    inverse: tl.tensor,
    grad: tl.tensor,
    grad_final: tl.tensor,
    right: tl.tensor,
    left: tl.tensor,
    initial: tl.tensor,
    sequences: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CORRECTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BV: tl.constexpr,
    READS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
) -> None:
    """The gradient of the state that leaves each chunk, and of what its tokens write."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    first_chunk = tl.load(sequences + 4 * sequence + 2)
    num_chunks = tl.load(sequences + 4 * sequence + 3)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    of_sequence = (sequence * H + head).to(tl.int64)
    state = load_state(grad_final, of_sequence, columns, K, V, BK, BLOCKS, not HAS_FINAL)
    for number in range(num_chunks):
        chunk = first_chunk + num_chunks - 1 - number
        of_chunk = (chunk * H + head).to(tl.int64)
        store_state(left, of_chunk, state, columns, K, V, BK, BLOCKS)
        first, inside, last = tokens_of(chunks, chunk, C)
        of_head = first * H + head + tl.arange(0, C) * H
        c, end = decays_of(decay, first, inside, last, head, H)
        found = tl.zeros([C, BV], tl.float32)
        for block in tl.static_range(BLOCKS):
            rows = block * BK + tl.arange(0, BK)
            keys = of_tokens(k, k_row, first, inside, group, rows, K)
            found += tl.dot(keys, state[block], input_precision=PRECISION)
        found *= tl.where(inside, tl.exp(end - c), 0.0)[:, None]
        if READS:
            found += of_tokens(right, H * V, first, inside, head, columns, V)
        if CORRECTED:
            square = tl.arange(0, C)[None, :] * C + tl.arange(0, C)[:, None]
            solver = tl.load(inverse + of_chunk * C * C + square)
            found = tl.dot(solver, found, input_precision=PRECISION)
        put(right, first, inside, head, columns, found, H, V)
        later = ()
        for block in tl.static_range(BLOCKS):
            rows = block * BK + tl.arange(0, BK)
            entering = tl.exp(end) * state[block]
            if READS:
                queries = of_tokens(q, q_row, first, inside, group, rows, K)
                arriving = of_tokens(grad, H * V, first, inside, head, columns, V)
                arriving *= tl.exp(c)[:, None]
                entering += tl.dot(tl.trans(queries), arriving, input_precision=PRECISION)
            if CORRECTED:
                keys = of_tokens(k, k_row, first, inside, group, rows, K)
                b = tl.load(beta + of_head, mask=inside, other=0.0)
                known = (tl.exp(c) * b)[:, None] * found
                entering -= tl.dot(tl.trans(keys), known, input_precision=PRECISION)
            later = later + (entering,)  # type: ignore[assignment]  # noqa: RUF005
        state = later
    store_state(initial, of_sequence, state, columns, K, V, BK, BLOCKS)


@triton.jit  # type: ignore[untyped-decorator]
def collect_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    v: tl.tensor,
    v_row: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    q: tl.tensor,
    q_row: tl.tensor,
    decay: tl.tensor,
    grad: tl.tensor,
    values: tl.tensor,
    right: tl.tensor,
    states: tl.tensor,
    left: tl.tensor,
    skip: tl.tensor,
    grad_q: tl.tensor,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    grad_decay: tl.tensor,
    grad_beta: tl.tensor,
    grad_skip: tl.tensor,
    num_tokens: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CORRECTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEADS: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    ADDS: tl.constexpr,
    SKIPS: tl.constexpr,
) -> None:
    """The gradients of a chunk, for a block of rows of the states of some heads of a key head."""
    SHARES: tl.constexpr = H // G // HEADS
    chunk, block = tl.program_id(0), tl.program_id(2)
    group, share = tl.program_id(1) // SHARES, tl.program_id(1) % SHARES
    first, inside, last = tokens_of(chunks, chunk, C)
    is_last = (tl.arange(0, C) == last)[:, None]
    rows = block * BK + tl.arange(0, BK)
    grad_q += share.to(tl.int64) * num_tokens * (G * K)
    grad_k += share.to(tl.int64) * num_tokens * (G * K)
    total_q, total_k = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    if ADDS:
        total_k = of_tokens(grad_k, G * K, first, inside, group, rows, K)
    for number in tl.static_range(HEADS):
        head = group * (H // G) + share * HEADS + number
        of_head = first * H + head + tl.arange(0, C) * H
        of_state = (chunk * H + head).to(tl.int64) * K * V
        c, end = decays_of(decay, first, inside, last, head, H)
        b = tl.load(beta + of_head, mask=inside, other=0.0)
        to_decay, to_beta = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        # What queries get, and keys for it.
        if READS:
            read_by, read_from = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
            for start in range(0, V, BV):
                columns = start + tl.arange(0, BV)
                arriving = of_tokens(grad, H * V, first, inside, head, columns, V)
                if CORRECTED:
                    written = of_tokens(values, H * V, first, inside, head, columns, V)
                else:
                    written = b[:, None] * of_tokens(v, v_row, first, inside, head, columns, V)
                place = rows[:, None] * V + columns[None, :]
                in_state = (rows < K)[:, None] & (columns < V)[None, :]
                state = tl.load(states + of_state + place, mask=in_state, other=0.0)
                read_by += tl.dot(arriving, tl.trans(written), input_precision=PRECISION)
                read_from += tl.dot(arriving, tl.trans(state), input_precision=PRECISION)
            read_by *= pairwise(c, C)
            keys = of_tokens(k, k_row, first, inside, group, rows, K)
            queries = of_tokens(q, q_row, first, inside, group, rows, K)
            to_q = tl.exp(c)[:, None] * read_from
            to_q += tl.dot(read_by, keys, input_precision=PRECISION)
            to_decay += tl.sum(queries * to_q, 1)
            total_q += to_q
            total_k += tl.dot(tl.trans(read_by), queries, input_precision=PRECISION)
        of_block = block.to(tl.int64) * num_tokens * H
        if WRITES:
            # What values and betas get, and keys by what was written and by what was known.
            if ADDS:
                to_decay = tl.load(grad_decay + of_block + of_head, mask=inside, other=0.0)
            in_system, known_to = tl.zeros([C, C], tl.float32), tl.zeros([C, BK], tl.float32)
            leaving, kept = tl.zeros([C, BK], tl.float32), tl.zeros([BK], tl.float32)
            own, solved = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
            skipped = tl.zeros([C], tl.float32)
            for start in range(0, V, BV):
                columns = start + tl.arange(0, BV)
                new = of_tokens(v, v_row, first, inside, head, columns, V)
                back = of_tokens(right, H * V, first, inside, head, columns, V)
                if CORRECTED:
                    written = of_tokens(values, H * V, first, inside, head, columns, V)
                else:
                    written = b[:, None] * new
                place = rows[:, None] * V + columns[None, :]
                in_state = (rows < K)[:, None] & (columns < V)[None, :]
                state = tl.load(states + of_state + place, mask=in_state, other=0.0)
                after = tl.load(left + of_state + place, mask=in_state, other=0.0)
                leaving += tl.dot(written, tl.trans(after), input_precision=PRECISION)
                if CORRECTED:
                    in_system += tl.dot(back, tl.trans(written), input_precision=PRECISION)
                    known_to += tl.dot(back, tl.trans(state), input_precision=PRECISION)
                kept += tl.sum(state * after, 1)
                if block == 0:
                    own += tl.sum(back * written, 1)
                    solved += tl.sum(back * new, 1)
                    to_new = b[:, None] * back
                    if SKIPS:
                        arriving = of_tokens(grad, H * V, first, inside, head, columns, V)
                        to_new += tl.load(skip + head) * arriving
                        skipped += tl.sum(arriving * new, 1)
                    put(grad_v, first, inside, head, columns, to_new, H, V)
            keys = of_tokens(k, k_row, first, inside, group, rows, K)
            to_k = tl.where(inside, tl.exp(end - c), 0.0)[:, None] * leaving
            # The last token gets what the state that leaves has of each token, and of before.
            to_end = tl.sum(keys * to_k, 1)
            to_decay += tl.sum(tl.where(is_last, to_end[None, :], 0.0), 1)
            to_decay += tl.sum(tl.where(is_last, tl.exp(end) * kept[None, :], 0.0), 1)
            if CORRECTED:
                below = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
                in_system = tl.where(below, -in_system * pairwise(c, C), 0.0)
                later = tl.dot(in_system, keys, input_precision=PRECISION)
                later -= tl.exp(c)[:, None] * known_to
                to_beta += tl.sum(keys * later, 1)
                to_decay += b * to_beta
                to_k += b[:, None] * later
                in_system *= b[:, None]
                to_k += tl.dot(tl.trans(in_system), keys, input_precision=PRECISION)
            total_k += to_k
            to_decay -= own
            to_beta += solved
            if SKIPS:  # noqa: SIM102
                if block == 0:
                    tl.store(grad_skip + of_head, skipped, mask=inside)
            tl.store(grad_beta + of_block + of_head, to_beta, mask=inside)
        tl.store(grad_decay + of_block + of_head, to_decay, mask=inside)
    if READS:
        put(grad_q, first, inside, group, rows, total_q, G, K)
    put(grad_k, first, inside, group, rows, total_k, G, K)


@triton.jit  # type: ignore[untyped-decorator]
def finish_kernel(
    chunks: tl.tensor,
    g: tl.tensor,
    decays: tl.tensor,
    betas: tl.tensor,
    grad_g: tl.tensor,
    grad_beta: tl.tensor,
    num_tokens: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Sums over blocks of rows, and over the tokens of a chunk that a decay is in front of."""
    # See `chunk_kernel`: below it a decay gets nothing.
    LEAST: tl.constexpr = -103.27892990343184
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, inside, _ = tokens_of(chunks, chunk, C)
    of_head = first * H + head + tl.arange(0, C) * H
    decay, beta = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for block in tl.static_range(BLOCKS):
        place = (block * num_tokens + first) * H + head + tl.arange(0, C) * H
        decay += tl.load(decays + place, mask=inside, other=0.0)
        beta += tl.load(betas + place, mask=inside, other=0.0)
    later = tl.arange(0, C)[None, :] >= tl.arange(0, C)[:, None]
    found = tl.sum(tl.where(later, decay[None, :], 0.0), 1)
    logs = tl.load(g + of_head, mask=inside, other=0.0)
    tl.store(grad_g + of_head, tl.where(logs < LEAST, 0.0, found), mask=inside)
    tl.store(grad_beta + of_head, beta, mask=inside)
