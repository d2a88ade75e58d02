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

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import ChunkTables, chunk_tables
from pcomm.gdn_cp.ops.entry import apply_function, differentiable_once, graph_break
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
    bias_D = None if bias_D is None else bias_D.contiguous()
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
    @differentiable_once
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
    arguments["results"] = results
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
        "grad_halo": grad_halo if width > 1 else None,
        "parts": parts,
        "num_parts": num_parts,
        "num_chunks": num_chunks,
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
    given = Inputs(
        x_TD, x_TD.stride(0), weight_DW, bias_D, halo_NPD if width > 1 else None, tables.chunks_M4,
        tables.sequences_N4, tl.constexpr(num_channels), tl.constexpr(width),
    )  # fmt: skip
    rows = max(_ROWS, 1 << (width - 1).bit_length())
    arguments = {"given": given, "SHAPES": tuple(shapes), "ROWS": rows, "EPS": _EPS}
    return arguments, sum(shape[4] for shape in shapes)


# -- the kernels -----------------------------------------------------------------------------
#
# SHAPES of sections: OFFSET in the channels, WIDTH of all heads, OWN channels of a block, COLUMNS
# of its tile, BLOCKS, and LENGTH of what is normalised, or 0.


class Inputs(NamedTuple):
    """What both kernels read. Without a bias or a halo, that is None."""

    x: Any
    row: Any
    weight: Any
    bias: Any
    halo: Any
    chunks: Any
    sequences: Any
    D: Any
    W: Any


class ChannelBlock(NamedTuple):
    """Columns of a section, which channels they are, and which of them there are."""

    columns: Any
    channels: Any
    is_own: Any


class Span(NamedTuple):
    """A sequence, its first token, and where its tokens end that are looked at."""

    sequence: Any
    start: Any
    stop: Any


@triton.jit  # type: ignore[untyped-decorator]
def convolution_kernel(
    given: Inputs, results: tl.tuple, SHAPES: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr
) -> None:
    """A block of channels of the tokens of a chunk."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(given.chunks + 4 * chunk), tl.load(given.chunks + 4 * chunk + 1)
    sequence = tl.load(given.chunks + 4 * chunk + 3)
    span = Span(sequence, tl.load(given.sequences + 4 * sequence), stop)
    for n in tl.static_range(len(SHAPES)):
        if (block >= 0) & (block < SHAPES[n][4]):
            own = _block(block, SHAPES, n)
            for tile in range(first, stop, ROWS):
                tokens = tile + tl.arange(0, ROWS)
                before = _before(given, tokens, span, own)
                y = (before * tl.sigmoid(before)).to(given.x.dtype.element_ty)
                if SHAPES[n][5] != 0.0:
                    wide = y.to(tl.float32)
                    y = wide * (tl.rsqrt(tl.sum(wide * wide, 1) + EPS) * SHAPES[n][5])[:, None]
                made = tokens.to(tl.int64)[:, None] * SHAPES[n][1] + own.columns[None, :]
                tl.store(results[n] + made, y, mask=(tokens < stop)[:, None] & own.is_own[None, :])
        block -= SHAPES[n][4]


@triton.jit  # type: ignore[untyped-decorator]
def _block(block: tl.tensor, SHAPES: tl.constexpr, n: tl.constexpr) -> ChannelBlock:
    """A block of the channels of a section."""
    places = tl.arange(0, SHAPES[n][3])
    columns = block * SHAPES[n][2] + places
    is_own = (places < SHAPES[n][2]) & (columns < SHAPES[n][1])
    return ChannelBlock(columns, SHAPES[n][0] + columns, is_own)


@triton.jit  # type: ignore[untyped-decorator]
def _before(given: Inputs, tokens: tl.tensor, span: Span, own: ChannelBlock) -> tl.tensor:
    """What SiLU is applied to, of tokens of a sequence."""
    total = tl.zeros([tokens.shape[0], own.columns.shape[0]], tl.float32)
    if given.bias is not None:
        constant = tl.load(given.bias + own.channels, mask=own.is_own, other=0.0)
        total += constant.to(tl.float32)[None, :]
    for w in tl.static_range(given.W):
        taken = _inputs(given, tokens - (given.W - 1 - w), span, own)
        total += taken * _tap(given, w, own)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _tap(given: Inputs, w: tl.tensor, own: ChannelBlock) -> tl.tensor:
    """One number of each filter, as a row."""
    tap = tl.load(given.weight + own.channels * given.W + w, mask=own.is_own, other=0.0)
    return tap.to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _of_halo(given: Inputs, tokens: tl.tensor, span: Span, own: ChannelBlock) -> tl.tuple:
    """Where the halo of a sequence has these tokens, and which rows of it they would be."""
    rows = tokens - span.start + (given.W - 1)
    place = (span.sequence.to(tl.int64) * (given.W - 1) + rows)[:, None] * given.D
    return place + own.channels[None, :], rows


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(given: Inputs, tokens: tl.tensor, span: Span, own: ChannelBlock) -> tl.tensor:
    """The inputs of tokens of a sequence, or of its halo before it."""
    there = (tokens >= span.start) & (tokens < span.stop)
    place = tokens.to(tl.int64)[:, None] * given.row + own.channels[None, :]
    inside = there[:, None] & own.is_own[None, :]
    taken = tl.load(given.x + place, mask=inside, other=0.0).to(tl.float32)
    if given.halo is not None:
        place, rows = _of_halo(given, tokens, span, own)
        older = ((rows >= 0) & (rows < given.W - 1))[:, None] & own.is_own[None, :]
        taken += tl.load(given.halo + place, mask=older, other=0.0).to(tl.float32)
    return taken


@triton.jit  # type: ignore[untyped-decorator]
def convolution_backward_kernel(
    given: Inputs,
    grads: tl.tuple,
    grad_x: tl.tensor,
    grad_halo: tl.tensor | None,
    parts: tl.tensor,
    num_parts: tl.tensor,
    num_chunks: tl.tensor,
    SHAPES: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The gradients of a block of channels, of every `num_parts`-th chunk."""
    block = tl.program_id(1)
    for n in tl.static_range(len(SHAPES)):
        if (block >= 0) & (block < SHAPES[n][4]):
            _section_back(
                given, grads[n], grad_x, grad_halo, parts, num_parts, num_chunks,
                _block(block, SHAPES, n), SHAPES, n, ROWS, EPS,
            )  # fmt: skip
        block -= SHAPES[n][4]


@triton.jit  # type: ignore[untyped-decorator]
def _section_back(
    given: Inputs,
    grad: tl.tensor,
    grad_x: tl.tensor,
    grad_halo: tl.tensor | None,
    parts: tl.tensor,
    num_parts: tl.tensor,
    num_chunks: tl.tensor,
    own: ChannelBlock,
    SHAPES: tl.constexpr,
    n: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = SHAPES[n][1]
    LENGTH: tl.constexpr = SHAPES[n][5]
    D: tl.constexpr = given.D
    W: tl.constexpr = given.W
    COLUMNS: tl.constexpr = own.columns.shape[0]
    TAPS: tl.constexpr = triton.next_power_of_2(W)
    part, taps = tl.program_id(0), tl.arange(0, TAPS)
    of_taps, of_bias = tl.zeros([COLUMNS, TAPS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for chunk in range(part, num_chunks, num_parts):
        at = given.chunks + 4 * chunk
        first, stop, end, sequence = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        span = Span(sequence, tl.load(given.sequences + 4 * sequence), stop)
        begin = first
        if given.halo is not None:
            # The halo lies in front of the tokens of the first chunk.
            begin -= tl.where(first == span.start, W - 1, 0)
        for tile in range(begin, stop, ROWS):
            tokens = tile + tl.arange(0, ROWS)
            taken = _inputs(given, tokens, span, own)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            # An input meets the tokens behind it, each with another tap of its filter.
            for shift in range(W):
                whole = Span(sequence, span.start, end)
                of_before = _gradient_before(
                    given, grad, tokens + shift, whole, own, WIDTH, LENGTH, EPS
                )
                of_before = tl.where((tokens < stop)[:, None], of_before, 0.0)
                w = W - 1 - shift
                total += of_before * _tap(given, w, own)
                found = tl.sum(of_before * taken, 0)
                of_taps += tl.where((taps == w)[None, :], found[:, None], 0.0)
                if given.bias is not None:
                    is_real = ((tokens >= span.start) & (shift == 0))[:, None]
                    of_bias += tl.sum(tl.where(is_real, of_before, 0.0), 0)
            made = tokens.to(tl.int64)[:, None] * D + own.channels[None, :]
            inside = ((tokens >= first) & (tokens < stop))[:, None] & own.is_own[None, :]
            tl.store(grad_x + made, total.to(grad_x.dtype.element_ty), mask=inside)
            if grad_halo is not None:
                made, rows = _of_halo(given, tokens, span, own)
                inside = ((tokens < span.start) & (rows >= 0))[:, None] & own.is_own[None, :]
                tl.store(grad_halo + made, total.to(grad_halo.dtype.element_ty), mask=inside)
    OF_CHANNEL: tl.constexpr = W if given.bias is None else W + 1
    mine = parts + part.to(tl.int64) * D * OF_CHANNEL
    inside = own.is_own[:, None] & (taps < W)[None, :]
    tl.store(mine + own.channels[:, None] * W + taps[None, :], of_taps, mask=inside)
    if given.bias is not None:
        tl.store(mine + D * W + own.channels, of_bias, mask=own.is_own)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_before(
    given: Inputs,
    grad: tl.tensor,
    tokens: tl.tensor,
    span: Span,
    own: ChannelBlock,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:
    """The gradient of what SiLU is applied to; zeros for tokens outside the sequence."""
    before = _before(given, tokens, span, own)
    inside = ((tokens >= span.start) & (tokens < span.stop))[:, None] & own.is_own[None, :]
    place = tokens.to(tl.int64)[:, None] * WIDTH + own.columns[None, :]
    arriving = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(before)
    if LENGTH != 0.0:
        y = (before * share).to(given.x.dtype.element_ty).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(tl.where(inside, y * y, 0.0), 1) + EPS)[:, None]
        along = tl.sum(arriving * y, 1)[:, None]
        arriving = LENGTH * inverse * (arriving - y * (along * inverse * inverse))
    found = arriving * share * (1.0 + before * (1.0 - share))
    return tl.where(inside, found, 0.0)
