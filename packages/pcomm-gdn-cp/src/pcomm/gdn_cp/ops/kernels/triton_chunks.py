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
    "Place",
    "Recurrence",
    "Rows",
    "Scanned",
    "Sizes",
    "Tokens",
    "chunk_kernel",
    "decays_of",
    "load_state",
    "local_launch",
    "numbers_of",
    "of_tokens",
    "of_values",
    "padded",
    "pairwise",
    "products_of",
    "put",
    "read_kernel",
    "read_launch",
    "read_state",
    "scan_kernel",
    "scan_launch",
    "sequence_of",
    "state_tile",
    "store_state",
    "tokens_of",
    "written_by",
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


class Rows(NamedTuple):
    """A tensor whose last two dimensions are contiguous, as kernels take it.

    Args:
        start: The tensor; its address within a kernel.
        step: Numbers from a row to the next.
    """

    start: Any
    step: Any

    @classmethod
    def of(cls, x_THD: Tensor) -> Rows:
        """Those of such a tensor."""
        return cls(x_THD, x_THD.stride(0))


class Tokens(NamedTuple):
    """What kernels are told of the tokens of a pack; None is what one does not read.

    Args:
        chunks: Table of the chunks; `ChunkTables` says what its rows are.
        k: Keys.
        v: Values.
        q: Queries.
        beta: `[T, H]` time steps, or by how much a write is corrected.
        decay: `[T, H]` logarithm of the decay since the start of the chunk.
        written: `[T, H, V]` what tokens write, with correction.
        grad: `[T, H, V]` gradient of what is read.
    """

    chunks: Any
    k: Any = None
    v: Any = None
    q: Any = None
    beta: Any = None
    decay: Any = None
    written: Any = None
    grad: Any = None


class Sizes(NamedTuple):
    """Constants of all kernels, each a `tl.constexpr`.

    The sizes of the letters above; the rows `BK` of a state at a time, which makes so many
    `BLOCKS`; whether it is the delta rule; and how tensor cores multiply fp32.
    """

    C: Any
    G: Any
    H: Any
    K: Any
    V: Any
    BK: Any
    BLOCKS: Any
    CORRECTED: Any
    PRECISION: Any


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
    def num_blocks(self) -> int:
        """Blocks of the rows of a state that are multiplied at a time."""
        key_dim = self.k_TGK.shape[2]
        return -(-key_dim // padded(key_dim, _ROWS))

    @property
    def rows(self) -> dict[str, Rows]:
        """Keys, values, and queries if there are any."""
        named = {"k": self.k_TGK, "v": self.v_THV, "q": self.q_TGK}
        return {name: Rows.of(x) for name, x in named.items() if x is not None}

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tokens: dict[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        **own: Any,
    ) -> KernelLaunch:
        """A launch with fields of `Tokens`, the sizes, and arguments of its own."""
        num_groups, key_dim = self.k_TGK.shape[1:]
        numbers = (KERNEL_CHUNK, num_groups, self.v_THV.shape[1], key_dim, self.v_THV.shape[2])
        others = (padded(key_dim, _ROWS), self.num_blocks, self.is_corrected, _precision())
        arguments = {
            "tokens": Tokens(self.tables.chunks_M4, **tokens),
            "sizes": Sizes(*map(tl.constexpr, numbers + others)),
            **own,
        }
        # Loads ahead of their turn would take registers that the products need.
        options = {"num_warps": num_warps, "num_stages": num_stages}
        return KernelLaunch(kernel, grid, arguments, self.k_TGK.device, options)

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
    tokens = {"beta": given.beta_TH}
    if given.is_corrected:
        tokens |= {"k": given.rows["k"]}
    own = {"g": given.g_TH, "decay": decay_TH, "inverse": inverse}
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
    columns = padded(value_dim, _SCAN_COLUMNS)
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
#
# Loads behind the end of a chunk give zeros, and with beta zero a token writes nothing. A tensor
# that there is not is None.


class Place(NamedTuple):
    """The tokens of a chunk.

    Args:
        first: The first token.
        inside: Which of `C` places have a token.
        last: The place of the last token.
    """

    first: Any
    inside: Any
    last: Any


@triton.jit  # type: ignore[untyped-decorator]
def tokens_of(chunks: tl.tensor, chunk: tl.tensor, C: tl.constexpr) -> Place:
    """The place of a chunk."""
    first, stop = tl.load(chunks + 4 * chunk), tl.load(chunks + 4 * chunk + 1)
    return Place(first.to(tl.int64), tl.arange(0, C) < stop - first, stop - first - 1)


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(at: Place, head: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """Where the numbers of a head of a chunk lie in `[T, H]`."""
    return at.first * H + head + tl.arange(0, at.inside.shape[0]) * H


@triton.jit  # type: ignore[untyped-decorator]
def of_tokens(
    x: Rows, at: Place, head: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """These columns of a head of a chunk, in fp32; zeros where there are none."""
    # Only the start has 64 bits: places are numbers of each thread, of which there are few.
    start = x.start + at.first * x.step + head * WIDTH
    place = tl.arange(0, at.inside.shape[0])[:, None] * x.step + columns[None, :]
    is_there = at.inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(start + place, mask=is_there, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def of_values(
    x: tl.tensor, at: Place, head: tl.tensor, columns: tl.tensor, sizes: Sizes
) -> tl.tensor:
    """The same of a contiguous tensor `[T, H, V]`."""
    return of_tokens(Rows(x, sizes.H * sizes.V), at, head, columns, sizes.V)


@triton.jit  # type: ignore[untyped-decorator]
def put(
    x: tl.tensor,
    at: Place,
    head: tl.tensor,
    columns: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write these columns of a head of a chunk; `x` is contiguous."""
    start = x + (at.first * HEADS + head) * WIDTH
    place = tl.arange(0, at.inside.shape[0])[:, None] * (HEADS * WIDTH) + columns[None, :]
    is_there = at.inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(start + place, values.to(x.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def decays_of(decay: tl.tensor, at: Place, head: tl.tensor, H: tl.constexpr) -> tl.tuple:
    """The logarithm of the decay from the start of a chunk to each place, and to its end."""
    end = tl.load(decay + (at.first + at.last) * H + head)
    # Behind the last token nothing decays: differences are never positive, and powers never large.
    c = tl.load(decay + numbers_of(at, head, H), mask=at.inside, other=0.0)
    return tl.where(at.inside, c, end), end


@triton.jit  # type: ignore[untyped-decorator]
def pairwise(c: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """`[C, C]` decay from token j to token i, zero where j comes after i."""
    places = tl.arange(0, C)
    is_kept = places[:, None] >= places[None, :]
    return tl.exp(tl.where(is_kept, c[:, None] - c[None, :], float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def products_of(x: Rows, y: Rows, at: Place, group: tl.tensor, sizes: Sizes) -> tl.tensor:
    """`[C, C]` products of a key head of two tensors of keys or queries: of i in x and j in y."""
    products = tl.zeros([sizes.C, sizes.C], tl.float32)
    for start in range(0, sizes.K, sizes.BK):
        rows = start + tl.arange(0, sizes.BK)
        left = of_tokens(x, at, group, rows, sizes.K)
        right = of_tokens(y, at, group, rows, sizes.K)
        products += tl.dot(left, tl.trans(right), input_precision=sizes.PRECISION)
    return products


@triton.jit  # type: ignore[untyped-decorator]
def written_by(
    tokens: Tokens, b: tl.tensor, at: Place, head: tl.tensor, columns: tl.tensor, sizes: Sizes
) -> tl.tensor:
    """These columns of what the tokens of a chunk write, as a scan left it or by their beta `b`."""
    if sizes.CORRECTED:
        written = of_values(tokens.written, at, head, columns, sizes)
    else:
        written = b[:, None] * of_tokens(tokens.v, at, head, columns, sizes.V)
    return written


@triton.jit  # type: ignore[untyped-decorator]
def state_tile(rows: tl.tensor, columns: tl.tensor, sizes: Sizes) -> tl.tuple:
    """Where these rows and columns of a state lie, and which of them there are."""
    in_state = (rows < sizes.K)[:, None] & (columns < sizes.V)[None, :]
    return rows[:, None] * sizes.V + columns[None, :], in_state


@triton.jit  # type: ignore[untyped-decorator]
def load_state(
    states: tl.tensor | None, start: tl.tensor, columns: tl.tensor, sizes: Sizes
) -> tl.tuple:
    """Columns of a state, block by block of its rows; zeros if there is none."""
    state = ()
    for block in tl.static_range(sizes.BLOCKS):
        if states is None:
            found = tl.zeros([sizes.BK, columns.shape[0]], tl.float32)
        else:
            rows = block * sizes.BK + tl.arange(0, sizes.BK)
            place, in_state = state_tile(rows, columns, sizes)
            own = states + start * sizes.K * sizes.V
            found = tl.load(own + place, mask=in_state, other=0.0)
        state = state + (found,)  # type: ignore[assignment]  # noqa: RUF005
    return state


@triton.jit  # type: ignore[untyped-decorator]
def store_state(
    states: tl.tensor, start: tl.tensor, state: tl.tuple, columns: tl.tensor, sizes: Sizes
) -> None:
    """What `load_state` loads."""
    for block in tl.static_range(sizes.BLOCKS):
        rows = block * sizes.BK + tl.arange(0, sizes.BK)
        place, in_state = state_tile(rows, columns, sizes)
        tl.store(states + start * sizes.K * sizes.V + place, state[block], mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def read_state(x: Rows, state: tl.tuple, at: Place, group: tl.tensor, sizes: Sizes) -> tl.tensor:
    """What keys or queries of a chunk read from columns of a state."""
    read = tl.zeros([sizes.C, state[0].shape[1]], tl.float32)
    for block in tl.static_range(sizes.BLOCKS):
        rows = block * sizes.BK + tl.arange(0, sizes.BK)
        found = of_tokens(x, at, group, rows, sizes.K)
        read += tl.dot(found, state[block], input_precision=sizes.PRECISION)
    return read


@triton.jit  # type: ignore[untyped-decorator]
def sequence_of(sequences: tl.tensor, sizes: Sizes, BV: tl.constexpr) -> tl.tuple:
    """What a program of a scan has: its first chunk and how many, its state, and its columns."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_chunk = tl.load(sequences + 4 * sequence + 2)
    num_chunks = tl.load(sequences + 4 * sequence + 3)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    return first_chunk, num_chunks, (sequence * sizes.H + head).to(tl.int64), columns


@triton.jit  # type: ignore[untyped-decorator]
def chunk_kernel(
    tokens: Tokens, sizes: Sizes, g: tl.tensor, decay: tl.tensor, inverse: tl.tensor | None
) -> None:
    """The decay since the start of a chunk, and the inverse of 1 + A."""
    # The logarithm of the smallest number of fp32: minus infinity counts as that.
    LEAST: tl.constexpr = -103.27892990343184
    C: tl.constexpr = sizes.C
    chunk, head = tl.program_id(0), tl.program_id(1)
    at = tokens_of(tokens.chunks, chunk, C)
    of_head = numbers_of(at, head, sizes.H)
    logs = tl.load(g + of_head, mask=at.inside, other=0.0)
    c = tl.cumsum(tl.where(logs < LEAST, LEAST, logs), 0)
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
    sizes: Sizes,
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
            rows = block * sizes.BK + tl.arange(0, sizes.BK)
            keys = of_tokens(tokens.k, at, group, rows, sizes.K)
            added = tl.dot(tl.trans(keys), kept, input_precision=sizes.PRECISION)
            added += tl.exp(end) * state[block]
            later = later + (added,)  # type: ignore[assignment]  # noqa: RUF005
        state = later
    store_state(final, of_sequence, state, columns, sizes)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(
    tokens: Tokens,
    sizes: Sizes,
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
