"""The mixers' short convolution with SiLU by Triton, and the norm of queries and keys after it.

One launch forward. One backward, which computes the convolution again, and one that adds up the
gradients of the filters. A program has the tokens of a chunk, so all that it reads from before them
is of one sequence or of its halo, and a block of channels: of what is normalised, a head. Each
section of the channels is a tensor of its own, so that nothing is cut or put together afterwards.
Importing this file imports Triton.
"""

# T tokens, N sequences, M chunks, D channels, W width of the filter, P = W - 1 tokens before a
# token, L programs with sums of their own, G heads of a section, K their width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd.function import once_differentiable

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import KERNEL_CHUNK, ChunkTables, chunk_tables
from pcomm.gdn_cp.ops.entry import apply_function, graph_break
from pcomm.gdn_cp.ops.kernels.triton_gates import sum_launch
from pcomm.gdn_cp.pack_offsets import PackOffsets

__all__ = [
    "Channels",
    "convolution_backward_kernel",
    "convolution_backward_launch",
    "convolution_kernel",
    "convolution_launch",
    "convolved_sections",
]

# Channels of a program where they are not normalised by heads; tokens at a time.
_BLOCK, _ROWS = 128, 32
# Most programs along the tokens that have sums of the filters' gradients.
_MOST_PARTS = 64
# Added to the squared length of a query or key.
_EPS = 1e-6


class Channels(NamedTuple):
    """A section of the channels: its heads and their width; the length of each after its norm.

    A length of 0 leaves them as they are.
    """

    num_heads: int
    width: int
    length: float = 0.0


@graph_break
def convolved_sections(
    x_TD: Tensor,
    weight_DW: Tensor,
    sections: Sequence[Channels],
    *,
    cu_seqlens: Sequence[int],
    bias_D: Tensor | None = None,
    initial_halo: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`causal_convolution`, cut into sections, of which some are normalised head by head.

    All tensors are on one device that Triton compiles for, of at most 32 bits, and there are
    tokens; shapes have been checked.

    Args:
        x_TD: `[T, D]` inputs, any strides.
        weight_DW: `[D, W]` filters.
        sections: Sections of the channels, side by side.
        cu_seqlens: Offsets of the sequences, on the host.
        bias_D: `[D]`, or nothing.
        initial_halo: `[N, W - 1, D]`, the inputs before each sequence; zeros by default.

    Returns:
        `[T, G, K]` of each section: in fp32 where it is normalised, in the dtype of `x_TD` else.
    """
    tables = PackOffsets.of(cu_seqlens).derived(chunk_tables, x_TD.device)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    halo = None if initial_halo is None else initial_halo.to(x_TD.dtype).contiguous()
    weight_DW = weight_DW.contiguous()
    constants = (tables, tuple(sections))
    found = apply_function(_Convolution, x_TD, weight_DW, bias_D, halo, *constants)
    shapes = ((-1, section.num_heads, section.width) for section in sections)
    return tuple(x.view(shape) for x, shape in zip(found, shapes, strict=True))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        halo: Tensor | None,
        tables: ChunkTables,
        sections: tuple[Channels, ...],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias, halo)
        ctx.constants = tables, sections
        launch, results = convolution_launch(x, weight, bias, halo, tables, sections)
        launch.run()
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, halo = ctx.saved_tensors
        tables, sections = ctx.constants
        arriving = [grad.contiguous() for grad in grads]
        launch, (grad_x, grad_halo, parts) = convolution_backward_launch(
            x, weight, bias, halo, arriving, tables, sections
        )
        launch.run()
        launch, total = sum_launch(parts, weight.dtype)
        launch.run()
        grad_weight = total[: weight.numel()].view(weight.shape)
        grad_bias = None if bias is None else total[weight.numel() :].to(bias.dtype)
        return grad_x, grad_weight, grad_bias, grad_halo, None, None


def convolution_launch(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo_NPD: Tensor | None,
    tables: ChunkTables,
    sections: Sequence[Channels],
) -> tuple[KernelLaunch, tuple[Tensor, ...]]:
    """All sections, `[T, G K]` each: chunks times blocks of channels."""
    dtypes = (torch.float32 if section.length else x_TD.dtype for section in sections)
    results = tuple(
        x_TD.new_empty(len(x_TD), section.num_heads * section.width, dtype=dtype)
        for section, dtype in zip(sections, dtypes, strict=True)
    )
    arguments, num_blocks = _arguments(x_TD, weight_DW, bias_D, halo_NPD, tables, sections)
    arguments |= {"results": results, "EPS": _EPS}
    grid = (len(tables.chunks_M4), num_blocks)
    return KernelLaunch(convolution_kernel, grid, arguments, x_TD.device), results


def convolution_backward_launch(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo_NPD: Tensor | None,
    grads: Sequence[Tensor],
    tables: ChunkTables,
    sections: Sequence[Channels],
) -> tuple[KernelLaunch, tuple[Tensor, Tensor | None, Tensor]]:
    """Gradients of inputs and halo, and each program's of the filters, bias behind them."""
    num_chunks, (num_channels, width) = len(tables.chunks_M4), weight_DW.shape
    num_parts = min(num_chunks, _MOST_PARTS)
    grad_x = x_TD.new_empty(x_TD.shape)
    # A sequence without tokens has no chunk, and its halo no gradient from here.
    grad_halo = None if halo_NPD is None else torch.zeros_like(halo_NPD)
    of_channel = width if bias_D is None else width + 1
    parts = x_TD.new_empty(num_parts, num_channels * of_channel, dtype=torch.float32)
    arguments, num_blocks = _arguments(x_TD, weight_DW, bias_D, halo_NPD, tables, sections)
    arguments |= {
        "grads": tuple(grads),
        "grad_x": grad_x,
        "grad_halo": grad_x if grad_halo is None else grad_halo,
        "parts": parts,
        "num_parts": num_parts,
        "num_chunks": num_chunks,
        "EPS": _EPS,
    }
    launch = KernelLaunch(
        convolution_backward_kernel, (num_parts, num_blocks), arguments, x_TD.device
    )
    return launch, (grad_x, grad_halo, parts)


def _arguments(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo_NPD: Tensor | None,
    tables: ChunkTables,
    sections: Sequence[Channels],
) -> tuple[dict[str, Any], int]:
    """What both kernels take, and the number of blocks of channels."""
    num_channels, width = weight_DW.shape
    shapes, offset = list[tuple[Any, ...]](), 0
    for num_heads, head_width, length in sections:
        of_section = num_heads * head_width
        own = head_width if length else min(of_section, _BLOCK)
        blocks = -(-of_section // own)
        columns = 1 << (own - 1).bit_length()
        shapes.append((offset, of_section, own, columns, blocks, length))
        offset += of_section
    arguments = {
        "x": x_TD,
        "x_row": x_TD.stride(0),
        "weight": weight_DW,
        "bias": weight_DW if bias_D is None else bias_D,
        "halo": x_TD if halo_NPD is None else halo_NPD,
        "chunks": tables.chunks_M4,
        "sequences": tables.sequences_N4,
        "SHAPES": tuple(shapes),
        "C": KERNEL_CHUNK,
        "ROWS": max(_ROWS, 1 << (width - 1).bit_length()),
        "D": num_channels,
        "W": width,
        "HAS_BIAS": bias_D is not None,
        "HAS_HALO": halo_NPD is not None and width > 1,
    }
    return arguments, sum(shape[4] for shape in shapes)


# -- the kernels -----------------------------------------------------------------------------
#
# SHAPES of sections: OFFSET in the channels, WIDTH of all heads, OWN channels of a block, COLUMNS
# of its tile, BLOCKS, and LENGTH of what is normalised, or 0.


@triton.jit  # type: ignore[untyped-decorator]
def convolution_kernel(
    x: tl.tensor,
    x_row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    halo: tl.tensor,
    chunks: tl.tensor,
    sequences: tl.tensor,
    results: tl.tuple,
    SHAPES: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """A block of channels of the tokens of a chunk."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(chunks + 4 * chunk), tl.load(chunks + 4 * chunk + 1)
    sequence = tl.load(chunks + 4 * chunk + 3)
    start = tl.load(sequences + 4 * sequence)
    for n in tl.static_range(len(SHAPES)):
        if (block >= 0) & (block < SHAPES[n][4]):
            places = tl.arange(0, SHAPES[n][3])
            columns = block * SHAPES[n][2] + places
            is_own = (places < SHAPES[n][2]) & (columns < SHAPES[n][1])
            for tile in range(first, stop, ROWS):
                tokens = tile + tl.arange(0, ROWS)
                before = _before(
                    x, x_row, weight, bias, halo, tokens, start, stop, sequence,
                    SHAPES[n][0] + columns, is_own, D, W, HAS_BIAS, HAS_HALO,
                )  # fmt: skip
                y = (before * tl.sigmoid(before)).to(x.dtype.element_ty)
                if SHAPES[n][5] != 0.0:
                    wide = y.to(tl.float32)
                    y = wide * (tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * SHAPES[n][5])[:, None]
                made = tokens.to(tl.int64)[:, None] * SHAPES[n][1] + columns[None, :]
                tl.store(results[n] + made, y, mask=(tokens < stop)[:, None] & is_own[None, :])
        block -= SHAPES[n][4]


@triton.jit  # type: ignore[untyped-decorator]
def _before(
    x: tl.tensor,
    x_row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    halo: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    sequence: tl.tensor,
    channels: tl.tensor,
    is_own: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
) -> tl.tensor:
    """What SiLU is applied to, of tokens of a sequence from `start` that end at `stop`."""
    if HAS_BIAS:
        constant = tl.load(bias + channels, mask=is_own, other=0.0).to(tl.float32)
        total = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32) + constant[None, :]
    else:
        total = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    for w in tl.static_range(W):
        taken = _inputs(
            x, x_row, halo, tokens - (W - 1 - w), start, stop, sequence, channels, is_own, D, W,
            HAS_HALO,
        )  # fmt: skip
        tap = tl.load(weight + channels * W + w, mask=is_own, other=0.0).to(tl.float32)
        total += taken * tap[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    x: tl.tensor,
    x_row: tl.tensor,
    halo: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    sequence: tl.tensor,
    channels: tl.tensor,
    is_own: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_HALO: tl.constexpr,
) -> tl.tensor:
    """The inputs of tokens of a sequence, or of its halo before it."""
    there = (tokens >= start) & (tokens < stop)
    place = tokens.to(tl.int64)[:, None] * x_row + channels[None, :]
    taken = tl.load(x + place, mask=there[:, None] & is_own[None, :], other=0.0).to(tl.float32)
    if HAS_HALO:
        rows = tokens - start + (W - 1)
        older = (rows >= 0) & (rows < W - 1)
        place = (sequence.to(tl.int64) * (W - 1) + rows)[:, None] * D + channels[None, :]
        more = tl.load(halo + place, mask=older[:, None] & is_own[None, :], other=0.0)
        taken += more.to(tl.float32)
    return taken


@triton.jit  # type: ignore[untyped-decorator]
def convolution_backward_kernel(
    x: tl.tensor,
    x_row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    halo: tl.tensor,
    chunks: tl.tensor,
    sequences: tl.tensor,
    grads: tl.tuple,
    grad_x: tl.tensor,
    grad_halo: tl.tensor,
    parts: tl.tensor,
    num_parts: tl.tensor,
    num_chunks: tl.tensor,
    SHAPES: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The gradients of a block of channels, of every `num_parts`-th chunk."""
    part, block = tl.program_id(0), tl.program_id(1)
    for n in tl.static_range(len(SHAPES)):
        if (block >= 0) & (block < SHAPES[n][4]):
            _section_back(
                x, x_row, weight, bias, halo, chunks, sequences, grads[n], grad_x, grad_halo,
                parts, part, num_parts, num_chunks, block, SHAPES, n, ROWS, D, W, HAS_BIAS,
                HAS_HALO, EPS,
            )  # fmt: skip
        block -= SHAPES[n][4]


@triton.jit  # type: ignore[untyped-decorator]
def _section_back(
    x: tl.tensor,
    x_row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    halo: tl.tensor,
    chunks: tl.tensor,
    sequences: tl.tensor,
    grad: tl.tensor,
    grad_x: tl.tensor,
    grad_halo: tl.tensor,
    parts: tl.tensor,
    part: tl.tensor,
    num_parts: tl.tensor,
    num_chunks: tl.tensor,
    block: tl.tensor,
    SHAPES: tl.constexpr,
    n: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = SHAPES[n][1]
    COLUMNS: tl.constexpr = SHAPES[n][3]
    LENGTH: tl.constexpr = SHAPES[n][5]
    TAPS: tl.constexpr = triton.next_power_of_2(W)
    places = tl.arange(0, COLUMNS)
    columns = block * SHAPES[n][2] + places
    is_own = (places < SHAPES[n][2]) & (columns < WIDTH)
    channels = SHAPES[n][0] + columns
    taps = tl.arange(0, TAPS)
    of_taps, of_bias = tl.zeros([COLUMNS, TAPS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for chunk in range(part, num_chunks, num_parts):
        first, stop = tl.load(chunks + 4 * chunk), tl.load(chunks + 4 * chunk + 1)
        end, sequence = tl.load(chunks + 4 * chunk + 2), tl.load(chunks + 4 * chunk + 3)
        start = tl.load(sequences + 4 * sequence)
        begin = first
        if HAS_HALO:
            # The halo lies in front of the tokens of the first chunk.
            begin -= tl.where(first == start, W - 1, 0)
        for tile in range(begin, stop, ROWS):
            tokens = tile + tl.arange(0, ROWS)
            own = _inputs(
                x, x_row, halo, tokens, start, stop, sequence, channels, is_own, D, W, HAS_HALO
            )
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            # An input meets the tokens behind it, each with another tap of its filter.
            for shift in range(W):
                of_before = _gradient_before(
                    x, x_row, weight, bias, halo, grad, tokens + shift, start, end, sequence,
                    channels, columns, is_own, WIDTH, LENGTH, D, W, HAS_BIAS, HAS_HALO, EPS,
                )  # fmt: skip
                of_before = tl.where((tokens < stop)[:, None], of_before, 0.0)
                w = W - 1 - shift
                tap = tl.load(weight + channels * W + w, mask=is_own, other=0.0).to(tl.float32)
                total += of_before * tap[None, :]
                found = tl.sum(of_before * own, 0)
                of_taps += tl.where((taps == w)[None, :], found[:, None], 0.0)
                if HAS_BIAS:
                    is_real = ((tokens >= start) & (shift == 0))[:, None]
                    of_bias += tl.sum(tl.where(is_real, of_before, 0.0), 0)
            made = tokens.to(tl.int64)[:, None] * D + channels[None, :]
            inside = ((tokens >= first) & (tokens < stop))[:, None] & is_own[None, :]
            tl.store(grad_x + made, total.to(grad_x.dtype.element_ty), mask=inside)
            if HAS_HALO:
                rows = tokens - start + (W - 1)
                made = (sequence.to(tl.int64) * (W - 1) + rows)[:, None] * D + channels[None, :]
                inside = ((tokens < start) & (rows >= 0))[:, None] & is_own[None, :]
                tl.store(grad_halo + made, total.to(grad_halo.dtype.element_ty), mask=inside)
    OF_CHANNEL: tl.constexpr = W + 1 if HAS_BIAS else W
    mine = parts + part.to(tl.int64) * D * OF_CHANNEL
    inside = is_own[:, None] & (taps < W)[None, :]
    tl.store(mine + channels[:, None] * W + taps[None, :], of_taps, mask=inside)
    if HAS_BIAS:
        tl.store(mine + D * W + channels, of_bias, mask=is_own)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_before(
    x: tl.tensor,
    x_row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    halo: tl.tensor,
    grad: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    sequence: tl.tensor,
    channels: tl.tensor,
    columns: tl.tensor,
    is_own: tl.tensor,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HALO: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:
    """The gradient of what SiLU is applied to; zeros for tokens outside the sequence."""
    before = _before(
        x, x_row, weight, bias, halo, tokens, start, end, sequence, channels, is_own, D, W,
        HAS_BIAS, HAS_HALO,
    )  # fmt: skip
    inside = ((tokens >= start) & (tokens < end))[:, None] & is_own[None, :]
    place = tokens.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    arriving = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(before)
    if LENGTH != 0.0:
        y = (before * share).to(x.dtype.element_ty).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(tl.where(inside, y * y, 0.0), 1) + EPS)[:, None]
        along = tl.sum(arriving * y, 1)[:, None]
        arriving = LENGTH * inverse * (arriving - y * (along * inverse * inverse))
    found = arriving * share * (1.0 + before * (1.0 - share))
    return tl.where(inside, found, 0.0)
