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

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import KERNEL_CHUNK, ChunkTables

__all__ = [
    "Local",
    "Recurrence",
    "Scanned",
    "chunk_kernel",
    "decays_of",
    "load_state",
    "local_launch",
    "of_tokens",
    "padded",
    "pairwise",
    "put",
    "read_kernel",
    "read_launch",
    "scan_kernel",
    "scan_launch",
    "store_state",
    "tokens_of",
]

# Fewest rows and columns of a matrix that tensor cores multiply.
_LEAST = 16
# Rows of a state that are multiplied at a time: more would not fit in registers.
_ROWS = 64
# Columns of a state for one program of the scan, which has to wait for every chunk before: few, so
# that one sequence fills a GPU. Those of a program that reads, which does not wait: more.
_SCAN_COLUMNS, _READ_COLUMNS = 32, 64


def padded(size: int, most: int = 1 << 30) -> int:
    """The power of two from `size` on that tensor cores take, or `most` if that is less."""
    return min(max(_LEAST, 1 << (size - 1).bit_length()), most)


@dataclass(frozen=True)
class Recurrence:
    """Tokens of a pack, as the kernels take them.

    Args:
        tables: Tables of the chunks, on the device.
        q_TGK: `[T, G, K]` queries, or None if nothing is read.
        k_TGK: `[T, G, K]` keys; the last two dimensions of all three are contiguous.
        v_THV: `[T, H, V]` values.
        g_TH: `[T, H]` logarithm of the decay, fp32 and contiguous, as is the next.
        beta_TH: `[T, H]`.
        skip_H: `[H]` weights of the values that are added to the output, fp32, or None.
        is_corrected: True for the delta rule.
    """

    tables: ChunkTables
    q_TGK: Tensor | None
    k_TGK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    beta_TH: Tensor
    skip_H: Tensor | None
    is_corrected: bool

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """`[N, H, K, V]`."""
        num_heads, value_dim = self.v_THV.shape[1:]
        return len(self.tables.sequences_N4), num_heads, self.k_TGK.shape[2], value_dim

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of all kernels."""
        num_groups, key_dim = self.k_TGK.shape[1:]
        num_heads, value_dim = self.v_THV.shape[1:]
        return {
            "C": KERNEL_CHUNK,
            "G": num_groups,
            "H": num_heads,
            "K": key_dim,
            "V": value_dim,
            "BK": padded(key_dim, _ROWS),
            "CORRECTED": self.is_corrected,
            "PRECISION": _precision(),
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """Tensors that nearly all kernels take."""
        return {
            "k": self.k_TGK,
            "k_row": self.k_TGK.stride(0),
            "v": self.v_THV,
            "v_row": self.v_THV.stride(0),
            "beta": self.beta_TH,
            "chunks": self.tables.chunks_M4,
        }

    @property
    def queries(self) -> dict[str, Any]:
        """The queries; keys in the place of none, so that there is one signature."""
        q_TGK = self.k_TGK if self.q_TGK is None else self.q_TGK
        return {"q": q_TGK, "q_row": q_TGK.stride(0)}

    def new(self, *shape: int) -> Tensor:
        """An fp32 tensor on the device of the tokens."""
        return self.k_TGK.new_empty(shape, dtype=torch.float32)


def _precision() -> str:
    """How tensor cores multiply fp32: in one product of TF32 where torch may, else in three."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


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
    arguments = given.arguments | {
        "g": given.g_TH,
        "decay": decay_TH,
        "inverse": decay_TH if inverse is None else inverse,
        **given.sizes,
    }
    for name in ("v", "v_row", "V"):
        del arguments[name]
    grid = (num_chunks, num_heads)
    launch = KernelLaunch(chunk_kernel, grid, arguments, decay_TH.device, {"num_warps": 4})
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
    columns = padded(value_dim, _SCAN_COLUMNS)
    arguments = given.arguments | {
        "decay": local.decay_TH,
        "inverse": local.decay_TH if local.inverse_MHCC is None else local.inverse_MHCC,
        "initial": final if initial_NHKV is None else initial_NHKV,
        "values": states if values is None else values,
        "states": states,
        "final": final,
        "sequences": given.tables.sequences_N4,
        **given.sizes,
        "BLOCKS": -(-key_dim // given.sizes["BK"]),
        "BV": columns,
        "HAS_INITIAL": initial_NHKV is not None,
    }
    grid = (num_sequences, num_heads, -(-value_dim // columns))
    # Loads ahead of their turn would take registers that the products need.
    options = {"num_warps": 4, "num_stages": 1}
    launch = KernelLaunch(scan_kernel, grid, arguments, states.device, options)
    return launch, Scanned(values, states, final)


def read_launch(given: Recurrence, local: Local, scanned: Scanned) -> tuple[KernelLaunch, Tensor]:
    """What queries read, `[T, H, V]` in the dtype of the values: chunks, heads, columns."""
    _, num_heads, _, value_dim = given.state_shape
    output = given.v_THV.new_empty(given.v_THV.shape)
    columns = padded(value_dim, _READ_COLUMNS)
    values = scanned.states_MHKV if scanned.values_THV is None else scanned.values_THV
    arguments = given.arguments | given.queries | {
        "decay": local.decay_TH,
        "values": values,
        "states": scanned.states_MHKV,
        "skip": local.decay_TH if given.skip_H is None else given.skip_H,
        "output": output,
        **given.sizes,
        "BV": columns,
        "SKIPS": given.skip_H is not None,
    }  # fmt: skip
    grid = (len(given.tables.chunks_M4), num_heads, -(-value_dim // columns))
    options = {"num_warps": 4, "num_stages": 1}
    return KernelLaunch(read_kernel, grid, arguments, output.device, options), output


# -- the kernels -----------------------------------------------------------------------------
#
# `ChunkTables` says what the rows of `chunks` and `sequences` are. Loads behind the end of a chunk
# give zeros, and with beta zero a token writes nothing.


@triton.jit  # type: ignore[untyped-decorator]
def tokens_of(chunks: tl.tensor, chunk: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """The first token of a chunk, which places have a token, and the place of the last one."""
    first, stop = tl.load(chunks + 4 * chunk), tl.load(chunks + 4 * chunk + 1)
    return first.to(tl.int64), tl.arange(0, C) < stop - first, stop - first - 1


@triton.jit  # type: ignore[untyped-decorator]
def of_tokens(
    x: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """These columns of a head of a chunk, in fp32; zeros where there are none."""
    # Only the start has 64 bits: places are numbers of each thread, of which there are few.
    start = x + first * row + head * WIDTH
    place = tl.arange(0, inside.shape[0])[:, None] * row + columns[None, :]
    is_there = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(start + place, mask=is_there, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def put(
    x: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    columns: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write these columns of a head of a chunk; `x` is contiguous."""
    start = x + (first * HEADS + head) * WIDTH
    place = tl.arange(0, inside.shape[0])[:, None] * (HEADS * WIDTH) + columns[None, :]
    is_there = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(start + place, values.to(x.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def decays_of(
    decay: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    last: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
) -> tl.tuple:
    """The logarithm of the decay from the start of a chunk to each place, and to its end."""
    places = tl.arange(0, inside.shape[0])
    end = tl.load(decay + (first + last) * H + head)
    # Behind the last token nothing decays: differences are never positive, and powers never large.
    c = tl.load(decay + first * H + head + places * H, mask=inside, other=0.0)
    return tl.where(inside, c, end), end


@triton.jit  # type: ignore[untyped-decorator]
def pairwise(c: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """`[C, C]` decay from token j to token i, zero where j comes after i."""
    places = tl.arange(0, C)
    is_kept = places[:, None] >= places[None, :]
    return tl.exp(tl.where(is_kept, c[:, None] - c[None, :], float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def load_state(
    states: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_ZERO: tl.constexpr,
) -> tl.tuple:
    """Columns of a state, block by block of its rows; zeros if it is none."""
    state = ()
    for block in tl.static_range(BLOCKS):
        if IS_ZERO:
            found = tl.zeros([BK, columns.shape[0]], tl.float32)
        else:
            rows = block * BK + tl.arange(0, BK)
            in_state = (rows < K)[:, None] & (columns < V)[None, :]
            place = rows[:, None] * V + columns[None, :]
            found = tl.load(states + start * K * V + place, mask=in_state, other=0.0)
        state = state + (found,)  # type: ignore[assignment]  # noqa: RUF005
    return state


@triton.jit  # type: ignore[untyped-decorator]
def store_state(
    states: tl.tensor,
    start: tl.tensor,
    state: tl.tuple,
    columns: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """What `load_state` loads."""
    for block in tl.static_range(BLOCKS):
        rows = block * BK + tl.arange(0, BK)
        in_state = (rows < K)[:, None] & (columns < V)[None, :]
        place = rows[:, None] * V + columns[None, :]
        tl.store(states + start * K * V + place, state[block], mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def chunk_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    g: tl.tensor,
    decay: tl.tensor,
    inverse: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    CORRECTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """The decay since the start of a chunk, and the inverse of 1 + A."""
    # The logarithm of the smallest number of fp32: minus infinity counts as that.
    LEAST: tl.constexpr = -103.27892990343184
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, inside, _ = tokens_of(chunks, chunk, C)
    of_head = first * H + head + tl.arange(0, C) * H
    logs = tl.load(g + of_head, mask=inside, other=0.0)
    c = tl.cumsum(tl.where(logs < LEAST, LEAST, logs), 0)
    tl.store(decay + of_head, c, mask=inside)
    if CORRECTED:
        products = tl.zeros([C, C], tl.float32)
        for start in range(0, K, BK):
            rows = start + tl.arange(0, BK)
            keys = of_tokens(k, k_row, first, inside, head // (H // G), rows, K)
            products += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        b = tl.load(beta + of_head, mask=inside, other=0.0)
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        a = tl.where(i > j, b[:, None] * products * pairwise(c, C), 0.0)
        # Blocks on the diagonal, twice as long each time. With X the inverse of two neighbours,
        # and L what lies below the first and left of the second, that of both is X - X L X.
        x = tl.where(i == j, 1.0, 0.0) - tl.where((i ^ j) == 1, a, 0.0)
        for level in range(1, 6):
            below = tl.where(((i ^ j) >> level) == 1, a, 0.0)
            x -= tl.dot(tl.dot(x, below, input_precision=PRECISION), x, input_precision=PRECISION)
        start = (chunk * H + head).to(tl.int64) * C * C
        tl.store(inverse + start + i * C + j, x)


@triton.jit  # type: ignore[untyped-decorator]
def scan_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    v: tl.tensor,
    v_row: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    decay: tl.tensor,
    inverse: tl.tensor,
    initial: tl.tensor,
    values: tl.tensor,
    states: tl.tensor,
    final: tl.tensor,
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
    HAS_INITIAL: tl.constexpr,
) -> None:
    """The state that enters each chunk of a sequence, what tokens write, and the last state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    first_chunk = tl.load(sequences + 4 * sequence + 2)
    num_chunks = tl.load(sequences + 4 * sequence + 3)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    of_sequence = (sequence * H + head).to(tl.int64)
    state = load_state(initial, of_sequence, columns, K, V, BK, BLOCKS, not HAS_INITIAL)
    for number in range(num_chunks):
        chunk = first_chunk + number
        of_chunk = (chunk * H + head).to(tl.int64)
        store_state(states, of_chunk, state, columns, K, V, BK, BLOCKS)
        first, inside, last = tokens_of(chunks, chunk, C)
        of_head = first * H + head + tl.arange(0, C) * H
        c, end = decays_of(decay, first, inside, last, head, H)
        b = tl.load(beta + of_head, mask=inside, other=0.0)
        new = of_tokens(v, v_row, first, inside, head, columns, V)
        if CORRECTED:
            known = tl.zeros([C, BV], tl.float32)
            for block in tl.static_range(BLOCKS):
                rows = block * BK + tl.arange(0, BK)
                keys = of_tokens(k, k_row, first, inside, group, rows, K)
                known += tl.dot(keys, state[block], input_precision=PRECISION)
            error = new - tl.exp(c)[:, None] * known
            square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
            solver = tl.load(inverse + of_chunk * C * C + square)
            written = tl.dot(solver, b[:, None] * error, input_precision=PRECISION)
            put(values, first, inside, head, columns, written, H, V)
        else:
            written = b[:, None] * new
        kept = tl.where(inside, tl.exp(end - c), 0.0)[:, None] * written
        later = ()
        for block in tl.static_range(BLOCKS):
            rows = block * BK + tl.arange(0, BK)
            keys = of_tokens(k, k_row, first, inside, group, rows, K)
            added = tl.dot(tl.trans(keys), kept, input_precision=PRECISION)
            added += tl.exp(end) * state[block]
            later = later + (added,)  # type: ignore[assignment]  # noqa: RUF005
        state = later
    store_state(final, of_sequence, state, columns, K, V, BK, BLOCKS)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(
    k: tl.tensor,
    k_row: tl.tensor,
    v: tl.tensor,
    v_row: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    q: tl.tensor,
    q_row: tl.tensor,
    decay: tl.tensor,
    values: tl.tensor,
    states: tl.tensor,
    skip: tl.tensor,
    output: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CORRECTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SKIPS: tl.constexpr,
) -> None:
    """What the tokens of a chunk read from the state after their own write."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    first, inside, last = tokens_of(chunks, chunk, C)
    of_head = first * H + head + tl.arange(0, C) * H
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    of_chunk = (chunk * H + head).to(tl.int64) * K * V
    scores, read = tl.zeros([C, C], tl.float32), tl.zeros([C, BV], tl.float32)
    for start in range(0, K, BK):
        rows = start + tl.arange(0, BK)
        queries = of_tokens(q, q_row, first, inside, group, rows, K)
        keys = of_tokens(k, k_row, first, inside, group, rows, K)
        scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        place = rows[:, None] * V + columns[None, :]
        in_state = (rows < K)[:, None] & (columns < V)[None, :]
        state = tl.load(states + of_chunk + place, mask=in_state, other=0.0)
        read += tl.dot(queries, state, input_precision=PRECISION)
    c, _ = decays_of(decay, first, inside, last, head, H)
    if CORRECTED:
        written = of_tokens(values, H * V, first, inside, head, columns, V)
    else:
        written = of_tokens(v, v_row, first, inside, head, columns, V)
        written *= tl.load(beta + of_head, mask=inside, other=0.0)[:, None]
    read *= tl.exp(c)[:, None]
    read += tl.dot(scores * pairwise(c, C), written, input_precision=PRECISION)
    if SKIPS:
        more = of_tokens(v, v_row, first, inside, head, columns, V)
        read += tl.load(skip + head) * more
    put(output, first, inside, head, columns, read, H, V)
