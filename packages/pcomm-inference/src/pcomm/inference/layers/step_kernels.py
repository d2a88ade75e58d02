"""What stands between two products of a step on a GPU, in one launch or within the product.

Importing this file imports Triton. Few rows read a weight no faster than memory gives it, so there
`product` is a kernel of its own, which norms its input, gates its result or adds it to the residual
on the way. A program makes some outputs of all rows and walks over all inputs, so that a weight is
read once and the order of a sum depends on nothing but its length. Many rows are multiplied by
torch, and `add_norm` and `swiglu` are one launch each.

Numbers are rounded where separate operations round them, but for one place: `product` multiplies a
row by the weight of its norm, rounds, and divides by the root mean square behind the sum.
"""

# Shape suffixes: T rows, I inputs, O outputs of a product, F those behind a gate.

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.kernel_arithmetic import DTYPES, dot, rounded
from pcomm.inference.layers.norm import Norm

__all__ = ["add_norm", "product", "swiglu", "takes_gate", "takes_product", "takes_rows"]

# Rows up to which a product is one of this file; rows and outputs of the tiles of few rows.
_MOST_ROWS, _FEW_ROWS = 32, 16
# Longest row that a program of `add_norm` holds in its registers.
_MOST_WIDTH = 16_384
# Numbers of a program of `swiglu`.
_BLOCK = 1024


def takes_rows(x_TI: Tensor) -> bool:
    """Whether `add_norm` computes rows such as these."""
    return (
        x_TI.dtype in DTYPES
        and x_TI.dim() == 2
        and x_TI.is_contiguous()
        and x_TI.numel() > 0
        and x_TI.shape[1] <= _MOST_WIDTH
    )


def takes_gate(gate_up_T2F: Tensor) -> bool:
    """Whether `swiglu` computes it."""
    return gate_up_T2F.dtype in DTYPES and gate_up_T2F.is_contiguous() and gate_up_T2F.numel() > 0


def takes_product(x_TI: Tensor, weight_OI: Tensor, *, is_normed: bool) -> bool:
    """Whether `product` computes it.

    A row in fp16 is not normed there: times the weight of the norm, and not yet divided by its
    root mean square, it may be beyond the range.
    """
    return (
        0 < len(x_TI) <= _MOST_ROWS
        and x_TI.dim() == 2
        and x_TI.stride(1) == 1
        and x_TI.dtype == weight_OI.dtype
        and x_TI.dtype in (DTYPES[::2] if is_normed else DTYPES)
        and weight_OI.is_contiguous()
        and weight_OI.numel() > 0
    )


# -- a product of few rows -------------------------------------------------------------------


def product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual_TO: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """`x W^T + b` of few rows in one launch: `[T, O]`, contiguous.

    Args:
        x_TI: The rows, which `takes_product` takes.
        weight_OI: The weight, `[O, I]`.
        bias_O: The bias; None where the layer has none.
        norm: The norm that rows pass before the product; None where they pass none.
        residual_TO: Contiguous rows that the result is added to; None where nothing is added.
        is_gated: True for `silu(gate) * up`, `[T, O / 2]`, of results whose first half is the gate.
    """
    out_TF = x_TI.new_empty(len(x_TI), len(weight_OI) // (2 if is_gated else 1))
    num_rows, num_inputs = x_TI.shape
    is_few = num_rows <= _FEW_ROWS
    outputs = 16 if is_few else 32
    # A stage of the pipeline has 8 KiB of the weight, or 16 behind a gate, and 8 of the rows.
    inputs = 32 if x_TI.dtype == torch.float32 else 256 if is_few else 128
    arguments = {
        "x": x_TI,
        "weight": weight_OI,
        "bias": bias_O,
        "norm_weight": None if norm is None else norm.weight,
        "residual": residual_TO,
        "out": out_TF,
        "num_rows": num_rows,
        "x_stride": x_TI.stride(0),
        "eps": None if norm is None else norm.eps,
        "INPUTS": num_inputs,
        "OUTPUTS": out_TF.shape[1],
        "ROWS": _FEW_ROWS if is_few else _MOST_ROWS,
        "OUTPUT_TILE": outputs,
        "INPUT_TILE": inputs,
        "ADDS_ONE": norm is not None and norm.is_zero_centred,
        "IS_GATED": is_gated,
        "num_warps": 4,
        "num_stages": 4,
    }
    grid = (triton.cdiv(out_TF.shape[1], outputs),)
    KernelLaunch(product_kernel, grid, arguments, x_TI.device).run()
    return out_TF


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    norm_weight: tl.tensor | None,
    residual: tl.tensor | None,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor | None,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    INPUT_TILE: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> None:
    """Some outputs of all rows: a tile of the weight on the left, the rows on the right."""
    output = tl.program_id(0) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    row = tl.arange(0, ROWS)
    is_output, is_row = output < OUTPUTS, row < num_rows
    line = output.to(tl.int64) * INPUTS
    found = tl.full([OUTPUT_TILE, ROWS], 0.0, tl.float32)
    above = tl.full([OUTPUT_TILE, ROWS], 0.0, tl.float32)
    squares = tl.full([INPUT_TILE, ROWS], 0.0, tl.float32)
    for start in range(0, INPUTS, INPUT_TILE):
        column = start + tl.arange(0, INPUT_TILE)
        is_column = column < INPUTS
        is_read = is_output[:, None] & is_column[None, :]
        tile = tl.load(
            x + column[:, None] + (row * x_stride)[None, :],
            mask=is_column[:, None] & is_row[None, :],
            other=0.0,
        )
        if norm_weight is not None:
            wide = tile.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
            if ADDS_ONE:
                scale += 1.0
            tile = rounded(wide * scale[:, None], tile.dtype)
        left = tl.load(weight + line[:, None] + column[None, :], mask=is_read, other=0.0)
        found = dot(left, tile, found)
        if IS_GATED:
            below = weight + (line + OUTPUTS * INPUTS)[:, None] + column[None, :]
            above = dot(tl.load(below, mask=is_read, other=0.0), tile, above)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)[None, :]
        found *= factor
        above *= factor
    if bias is not None:
        found += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            own = tl.load(bias + OUTPUTS + output, mask=is_output, other=0.0)
            above += own.to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    result = rounded(found, dtype)
    if IS_GATED:
        result = _gated(result, rounded(above, dtype))
    place = (row * OUTPUTS)[None, :] + output[:, None]
    is_result = is_output[:, None] & is_row[None, :]
    if residual is not None:
        before = tl.load(residual + place, mask=is_result, other=0.0)
        result = rounded(before.to(tl.float32) + result.to(tl.float32), dtype)
    tl.store(out + place, result, mask=is_result)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate: tl.tensor, up: tl.tensor) -> Any:
    """`silu(gate) * up`, the first rounded as an operation of its own would."""
    wide = gate.to(tl.float32)
    silu = rounded(wide / (1.0 + tl.exp(-wide)), gate.dtype)
    return rounded(silu.to(tl.float32) * up.to(tl.float32), gate.dtype)


# -- between the products of many rows -------------------------------------------------------


def add_norm(x_TD: Tensor, y_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`x + y` and its norm, in one launch: both `[T, D]`.

    Args:
        x_TD: The residual stream, which `takes_rows` takes; it is not changed.
        y_TD: Contiguous rows that are added to it; None where the sum is `x_TD` itself.
        norm: The norm that the sum passes.
    """
    normed_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if y_TD is None else torch.empty_like(x_TD)
    width = x_TD.shape[1]
    block = triton.next_power_of_2(width)
    arguments = {
        "x": x_TD,
        "y": y_TD,
        "weight": norm.weight,
        "sums": sum_TD,
        "normed": normed_TD,
        "eps": norm.eps,
        "WIDTH": width,
        "BLOCK": block,
        "ADDS_ONE": norm.is_zero_centred,
        # 16 numbers of a row for each thread, up to as many threads as a block may have.
        "num_warps": min(max(block // 512, 1), 32),
    }
    KernelLaunch(add_norm_kernel, (len(x_TD),), arguments, x_TD.device).run()
    return sum_TD, normed_TD


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(
    x: tl.tensor,
    y: tl.tensor | None,
    weight: tl.tensor,
    sums: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> None:
    """One row."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    found = tl.load(x + start + column, mask=is_column, other=0.0)
    if y is not None:
        addend = tl.load(y + start + column, mask=is_column, other=0.0)
        found = rounded(found.to(tl.float32) + addend.to(tl.float32), found.dtype)
        tl.store(sums + start + column, found, mask=is_column)
    wide = found.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scale = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if ADDS_ONE:
        scale += 1.0
    result = rounded(wide * factor * scale, found.dtype)
    tl.store(normed + start + column, result, mask=is_column)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` of two halves side by side, in one launch: `[T, F]`.

    Args:
        gate_up_T2F: The gate, and then what it is multiplied with; contiguous.
    """
    num_rows, width = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_rows, width)
    arguments = {"gate_up": gate_up_T2F, "out": out_TF, "WIDTH": width, "BLOCK": _BLOCK}
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    KernelLaunch(swiglu_kernel, grid, arguments, out_TF.device).run()
    return out_TF


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=is_column, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * WIDTH + column, mask=is_column, other=0.0)
    tl.store(out + row * WIDTH + column, _gated(gate, up), mask=is_column)
