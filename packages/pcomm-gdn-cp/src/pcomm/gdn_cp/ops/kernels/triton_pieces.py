"""What the kernels of both chunked recurrences are told, and the pieces that they are made of.

Importing this file imports Triton. Loads behind the end of a chunk give zeros, and with beta zero a
token writes nothing. A tensor that there is not is None.
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
    "ChunkSizes",
    "ChunkTokens",
    "Recurrence",
    "Rows",
    "Tokens",
    "decays_of",
    "load_state",
    "numbers_of",
    "of_tokens",
    "of_values",
    "padded",
    "pairwise",
    "products_of",
    "put",
    "read_state",
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
# Columns of a state for one program of a scan, which has to wait for every chunk before: few, so
# that one sequence fills a GPU. And numbers of a state that it keeps: the products of more would
# not fit in Blackwell's tensor memory.
_SCAN_COLUMNS, _SCAN_NUMBERS = 32, 32 * 128


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


class ChunkSizes(NamedTuple):
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
    def scan_columns(self) -> int:
        """Columns of a state that a program of a scan keeps."""
        key_dim, value_dim = self.state_shape[2:]
        most = max(_LEAST, _SCAN_NUMBERS // padded(key_dim))
        return padded(value_dim, min(_SCAN_COLUMNS, most))

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
            "sizes": ChunkSizes(*map(tl.constexpr, numbers + others)),
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


# -- pieces of kernels -----------------------------------------------------------------------


class ChunkTokens(NamedTuple):
    """The tokens of a chunk.

    Args:
        first: The first token.
        inside: True for each place that has a token, `[C]`.
        last: The place of the last token.
    """

    first: Any
    inside: Any
    last: Any


@triton.jit  # type: ignore[untyped-decorator]
def tokens_of(chunks: tl.tensor, chunk: tl.tensor, C: tl.constexpr) -> ChunkTokens:
    """The tokens of a chunk."""
    first, stop = tl.load(chunks + 4 * chunk), tl.load(chunks + 4 * chunk + 1)
    return ChunkTokens(first.to(tl.int64), tl.arange(0, C) < stop - first, stop - first - 1)


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(at: ChunkTokens, head: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """Where the numbers of a head of a chunk lie in `[T, H]`."""
    return at.first * H + head + tl.arange(0, at.inside.shape[0]) * H


@triton.jit  # type: ignore[untyped-decorator]
def of_tokens(
    x: Rows, at: ChunkTokens, head: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """These columns of a head of a chunk, in fp32; zeros where there are none."""
    # Only the start has 64 bits: places are numbers of each thread, of which there are few.
    start = x.start + at.first * x.step + head * WIDTH
    place = tl.arange(0, at.inside.shape[0])[:, None] * x.step + columns[None, :]
    is_there = at.inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(start + place, mask=is_there, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def of_values(
    x: tl.tensor, at: ChunkTokens, head: tl.tensor, columns: tl.tensor, sizes: ChunkSizes
) -> tl.tensor:
    """The same of a contiguous tensor `[T, H, V]`."""
    return of_tokens(Rows(x, sizes.H * sizes.V), at, head, columns, sizes.V)


@triton.jit  # type: ignore[untyped-decorator]
def put(
    x: tl.tensor,
    at: ChunkTokens,
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
def decays_of(decay: tl.tensor, at: ChunkTokens, head: tl.tensor, H: tl.constexpr) -> tl.tuple:
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
def products_of(
    x: Rows, y: Rows, at: ChunkTokens, group: tl.tensor, sizes: ChunkSizes
) -> tl.tensor:
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
    tokens: Tokens,
    b: tl.tensor,
    at: ChunkTokens,
    head: tl.tensor,
    columns: tl.tensor,
    sizes: ChunkSizes,
) -> tl.tensor:
    """These columns of what the tokens of a chunk write, as a scan left it or by their beta `b`."""
    if sizes.CORRECTED:
        written = of_values(tokens.written, at, head, columns, sizes)
    else:
        written = b[:, None] * of_tokens(tokens.v, at, head, columns, sizes.V)
    return written


@triton.jit  # type: ignore[untyped-decorator]
def state_tile(rows: tl.tensor, columns: tl.tensor, sizes: ChunkSizes) -> tl.tuple:
    """Where these rows and columns of a state lie, and which of them there are."""
    in_state = (rows < sizes.K)[:, None] & (columns < sizes.V)[None, :]
    return rows[:, None] * sizes.V + columns[None, :], in_state


@triton.jit  # type: ignore[untyped-decorator]
def load_state(
    states: tl.tensor | None, start: tl.tensor, columns: tl.tensor, sizes: ChunkSizes
) -> tl.tuple:
    """Columns of a state, block by block of its rows; zeros if there is none."""
    state = ()
    for block in tl.static_range(sizes.BLOCKS):
        if states is None:
            found = tl.zeros([sizes.BK, columns.shape[0]], tl.float32)
        else:
            rows = tl.arange(0, sizes.BK) + block * sizes.BK
            place, in_state = state_tile(rows, columns, sizes)
            own = states + start * sizes.K * sizes.V
            found = tl.load(own + place, mask=in_state, other=0.0)
        state = state + (found,)  # type: ignore[assignment]  # noqa: RUF005
    return state


@triton.jit  # type: ignore[untyped-decorator]
def store_state(
    states: tl.tensor, start: tl.tensor, state: tl.tuple, columns: tl.tensor, sizes: ChunkSizes
) -> None:
    """What `load_state` loads."""
    for block in tl.static_range(sizes.BLOCKS):
        rows = tl.arange(0, sizes.BK) + block * sizes.BK
        place, in_state = state_tile(rows, columns, sizes)
        tl.store(states + start * sizes.K * sizes.V + place, state[block], mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def read_state(
    x: Rows, state: tl.tuple, at: ChunkTokens, group: tl.tensor, sizes: ChunkSizes
) -> tl.tensor:
    """What keys or queries of a chunk read from columns of a state."""
    read = tl.zeros([sizes.C, state[0].shape[1]], tl.float32)
    for block in tl.static_range(sizes.BLOCKS):
        rows = tl.arange(0, sizes.BK) + block * sizes.BK
        found = of_tokens(x, at, group, rows, sizes.K)
        read += tl.dot(found, state[block], input_precision=sizes.PRECISION)
    return read


@triton.jit  # type: ignore[untyped-decorator]
def sequence_of(sequences: tl.tensor, sizes: ChunkSizes, BV: tl.constexpr) -> tl.tuple:
    """What a program of a scan has: its first chunk and how many, its state, and its columns."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_chunk = tl.load(sequences + 4 * sequence + 2)
    num_chunks = tl.load(sequences + 4 * sequence + 3)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    return first_chunk, num_chunks, (sequence * sizes.H + head).to(tl.int64), columns
