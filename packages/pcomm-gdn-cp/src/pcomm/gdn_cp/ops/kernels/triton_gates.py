"""Gates, time steps and gated norms by Triton: one launch each, and two backward.

The second launch backward adds up what the programs have of the parameters' gradients, in their
order. Formulas and rounding are those of `delta_gates`, `time_steps`, `rms_norm_then_gate` and
`gate_then_rms_norm`. Importing this file imports Triton.
"""

# T tokens, H heads, D normalised dimension, E groups, L rows, P programs with sums of their own

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.entry import apply_function, differentiable_once, graph_break

__all__ = [
    "delta_gates",
    "gated_norm",
    "gates_backward_kernel",
    "gates_backward_launch",
    "gates_kernel",
    "gates_launch",
    "norm_backward_kernel",
    "norm_backward_launch",
    "norm_kernel",
    "norm_launch",
    "sum_kernel",
    "sum_launch",
    "time_steps_and_decays",
]

# Numbers of a tile, of which a thread has 16.
_TILE, _WIDE_TILE = 2048, 8192
# Most heads of a token that stay a dimension of their own. Their number is compiled in, and each is
# a program of the grid's second dimension, which ends at 65,535.
_MOST_HEADS = 1024
# Most programs that have sums of the parameters' gradients.
_MOST_PARTS = 512
# Columns of a program that adds up these sums, and how many of them at a time.
_SUM_COLUMNS, _SUM_ROWS = 64, 32


@graph_break
def delta_gates(
    a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_gates` of tensors of at most 32 bits: logarithm of the decay and beta, in fp32."""
    parameters = a_log_H.contiguous(), dt_bias_H.contiguous()
    g_TH, beta_TH = apply_function(_Gates, a_TH, b_TH, *parameters)
    return g_TH, beta_TH


@graph_break
def time_steps_and_decays(
    dt_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """`[T, H]` logarithm of the decay, and time step, of Mamba-2, in fp32."""
    parameters = a_log_H.contiguous(), dt_bias_H.contiguous()
    g_TH, time_TH = apply_function(_Gates, dt_TH, None, *parameters)
    return g_TH, time_TH


@graph_break
def gated_norm(
    x: Tensor, gate: Tensor, weight_F: Tensor, *, num_groups: int, eps: float, gate_first: bool
) -> Tensor:
    """`gate_then_rms_norm`, or `rms_norm_then_gate` with one group, of at most 32 bits.

    Args:
        x: `[..., F]`.
        gate: `[..., F]`.
        weight_F: `[F]`.
        num_groups: Groups of consecutive features, each normalised by itself.
        eps: Added to the mean square.
        gate_first: True to gate before the norm.
    """
    # Heads may lie apart, as those of a gate among other projections do.
    shared = num_groups == 1 and x.dim() > 2 and x.shape[-2] <= _MOST_HEADS
    shape = x.shape[-2:] if shared else (num_groups, x.shape[-1] // num_groups)
    x_LED, gate_LED = (y.reshape(-1, *shape) for y in (x, gate))
    weight_F = weight_F.contiguous()
    found: Tensor = apply_function(_GatedNorm, x_LED, gate_LED, weight_F, eps, gate_first)
    return found.view(x.shape)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor | None, a_log: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, a_log, bias)
        ctx.set_materialize_grads(False)
        launch, results = gates_launch(a, b, a_log, bias)
        launch.run()
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        a, b, a_log, bias = ctx.saved_tensors
        grad_g, grad_other = (
            torch.zeros_like(a, dtype=torch.float32) if x is None else x.contiguous() for x in grads
        )
        launch, (grad_a, grad_b, parts) = gates_backward_launch(
            a, b, a_log, bias, grad_g, grad_other
        )
        launch.run()
        launch, total = sum_launch(parts, a_log.dtype)
        launch.run()
        grad_log, grad_bias = total.view(2, -1)
        return grad_a, grad_b, grad_log, grad_bias.to(bias.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.constants = eps, gate_first
        launch, result = norm_launch(x, gate, weight, eps, gate_first)
        launch.run()
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        launch, (grad_x, grad_gate, parts) = norm_backward_launch(
            x, gate, weight, grads[0].contiguous(), *ctx.constants
        )
        launch.run()
        launch, grad_weight = sum_launch(parts, weight.dtype)
        launch.run()
        return grad_x, grad_gate, grad_weight, None, None


# -- launches --------------------------------------------------------------------------------


def gates_launch(
    a_TH: Tensor, b_TH: Tensor | None, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[KernelLaunch, tuple[Tensor, Tensor]]:
    """Logarithms of decays, and betas; time steps in their place where there is no `b_TH`."""
    g, other = (a_TH.new_empty(a_TH.shape, dtype=torch.float32) for _ in range(2))
    given, num_tiles = _gate_inputs(a_TH, b_TH, a_log_H, dt_bias_H)
    arguments = {"given": given, "g": g, "other": other}
    return KernelLaunch(gates_kernel, (num_tiles,), arguments, g.device), (g, other)


def gates_backward_launch(
    a_TH: Tensor,
    b_TH: Tensor | None,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    grad_g_TH: Tensor,
    grad_other_TH: Tensor,
) -> tuple[KernelLaunch, tuple[Tensor, Tensor | None, Tensor]]:
    """Gradients of both projections, and each program's of the two parameters."""
    given, num_tiles = _gate_inputs(a_TH, b_TH, a_log_H, dt_bias_H)
    num_parts = min(num_tiles, _MOST_PARTS)
    grad_a = a_TH.new_empty(a_TH.shape)
    grad_b = None if b_TH is None else b_TH.new_empty(b_TH.shape)
    parts = a_TH.new_empty(num_parts, 2 * a_TH.shape[1], dtype=torch.float32)
    arguments = {
        "given": given,
        "grad_g": grad_g_TH,
        "grad_other": grad_other_TH,
        "grad_a": grad_a,
        "grad_b": grad_b,
        "parts": parts,
        "num_parts": num_parts,
    }
    launch = KernelLaunch(gates_backward_kernel, (num_parts,), arguments, parts.device)
    return launch, (grad_a, grad_b, parts)


def _gate_inputs(
    a_TH: Tensor, b_TH: Tensor | None, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[GateInputs, int]:
    """What both kernels read, and the number of tiles."""
    num_tokens, num_heads = a_TH.shape
    columns = 1 << (num_heads - 1).bit_length()
    rows = max(1, _TILE // columns)
    b_strides = None if b_TH is None else b_TH.stride()
    sizes = map(tl.constexpr, (num_heads, columns, rows))
    tensors = (a_TH, a_TH.stride(), b_TH, b_strides, a_log_H, dt_bias_H)
    return GateInputs(*tensors, num_tokens, *sizes), -(-num_tokens // rows)


def norm_launch(
    x_LED: Tensor, gate_LED: Tensor, weight_F: Tensor, eps: float, gate_first: bool
) -> tuple[KernelLaunch, Tensor]:
    """The gated norm of each row and group; one weight for all groups, or one for each."""
    given, options, (num_tiles, num_groups) = _norm_inputs(
        x_LED, gate_LED, weight_F, eps, gate_first
    )
    output = x_LED.new_empty(x_LED.shape)
    arguments = {"given": given, "output": output}
    grid = (num_tiles, num_groups)
    return KernelLaunch(norm_kernel, grid, arguments, output.device, options), output


def norm_backward_launch(
    x_LED: Tensor,
    gate_LED: Tensor,
    weight_F: Tensor,
    grad_LED: Tensor,
    eps: float,
    gate_first: bool,
) -> tuple[KernelLaunch, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of both tensors, and each program's of the weight."""
    given, options, (num_tiles, num_groups) = _norm_inputs(
        x_LED, gate_LED, weight_F, eps, gate_first
    )
    num_parts = min(num_tiles, max(1, _MOST_PARTS // num_groups))
    num_sums = num_parts * num_groups * x_LED.shape[2] // len(weight_F)
    parts = x_LED.new_empty(num_sums, len(weight_F), dtype=torch.float32)
    grads = x_LED.new_empty(x_LED.shape), gate_LED.new_empty(gate_LED.shape)
    arguments = {
        "given": given,
        "grad": grad_LED,
        "grad_x": grads[0],
        "grad_gate": grads[1],
        "parts": parts,
        "num_parts": num_parts,
    }
    grid = (num_parts, num_groups)
    launch = KernelLaunch(norm_backward_kernel, grid, arguments, parts.device, options)
    return launch, (*grads, parts)


def _norm_inputs(
    x_LED: Tensor, gate_LED: Tensor, weight_F: Tensor, eps: float, gate_first: bool
) -> tuple[NormInputs, dict[str, int], tuple[int, int]]:
    """What both kernels read, how they are compiled, and the numbers of tiles and groups."""
    num_rows, num_groups, width = x_LED.shape
    columns = 1 << (width - 1).bit_length()
    rows = max(1, _TILE // columns)
    tensors = (x_LED, x_LED.stride(), gate_LED, gate_LED.stride(), weight_F)
    constants = (num_groups, width, columns, rows, len(weight_F) > width, gate_first)
    given = NormInputs(*tensors, num_rows, eps, *map(tl.constexpr, constants))
    warps = 4 if columns <= _TILE else 8 if columns <= _WIDE_TILE else 16
    return given, {"num_warps": warps}, (-(-num_rows // rows), num_groups)


def sum_launch(parts_PF: Tensor, dtype: torch.dtype) -> tuple[KernelLaunch, Tensor]:
    """`[F]` sums over the programs."""
    num_parts, width = parts_PF.shape
    total = parts_PF.new_empty(width, dtype=dtype)
    arguments = {
        "parts": parts_PF,
        "total": total,
        "num_parts": num_parts,
        "width": width,
        "ROWS": _SUM_ROWS,
        "COLUMNS": _SUM_COLUMNS,
    }
    grid = (-(-width // _SUM_COLUMNS),)
    return KernelLaunch(sum_kernel, grid, arguments, total.device), total


# -- the kernels -----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + e^x)` to the last bits also where `e^x` is small beside 1."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    # What rounding of `more` has left out is put back by the quotient.
    left = tl.where(more == 1.0, 1.0, more - 1.0)
    rest = tl.where(more == 1.0, small, tl.log(more) * (small / left))
    return tl.maximum(x, 0.0) + rest


class GateInputs(NamedTuple):
    """What both kernels of gates read; without `b` the second result is the time step.

    The last three are constants: heads, the power of two they are padded to, and tokens of a tile.
    """

    a: Any
    a_strides: Any
    b: Any
    b_strides: Any
    a_log: Any
    bias: Any
    num_tokens: Any
    H: Any
    BH: Any
    ROWS: Any


@triton.jit  # type: ignore[untyped-decorator]
def _parameters(given: GateInputs) -> tl.tuple:
    """The rate of the decay of each head, and the bias, as rows."""
    heads = tl.arange(0, given.BH)
    rate = tl.exp(tl.load(given.a_log + heads, mask=heads < given.H, other=0.0).to(tl.float32))
    more = tl.load(given.bias + heads, mask=heads < given.H, other=0.0).to(tl.float32)
    return rate[None, :], more[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(x: tl.tensor, strides: tl.tuple, tokens: tl.tensor, given: GateInputs) -> tl.tensor:
    """A tile of a projection."""
    heads = tl.arange(0, given.BH)
    inside = (tokens < given.num_tokens)[:, None] & (heads < given.H)[None, :]
    place = tokens[:, None] * strides[0] + heads[None, :] * strides[1]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def gates_kernel(given: GateInputs, g: tl.tensor, other: tl.tensor) -> None:
    """Logarithms of decays, and betas or time steps, of a tile of tokens."""
    heads = tl.arange(0, given.BH)
    tokens = tl.program_id(0).to(tl.int64) * given.ROWS + tl.arange(0, given.ROWS)
    inside = (tokens < given.num_tokens)[:, None] & (heads < given.H)[None, :]
    rate, more = _parameters(given)
    time = softplus(_numbers(given.a, given.a_strides, tokens, given) + more)
    made = tokens[:, None] * given.H + heads[None, :]
    tl.store(g + made, -rate * time, mask=inside)
    if given.b is not None:
        time = tl.sigmoid(_numbers(given.b, given.b_strides, tokens, given))
    tl.store(other + made, time, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gates_backward_kernel(
    given: GateInputs,
    grad_g: tl.tensor,
    grad_other: tl.tensor,
    grad_a: tl.tensor,
    grad_b: tl.tensor | None,
    parts: tl.tensor,
    num_parts: tl.tensor,
) -> None:
    """Gradients of the projections of each tile of this program, and its sums."""
    H: tl.constexpr = given.H
    heads, part = tl.arange(0, given.BH), tl.program_id(0)
    rate, more = _parameters(given)
    of_log, of_bias = tl.zeros([given.BH], tl.float32), tl.zeros([given.BH], tl.float32)
    for tile in range(part, tl.cdiv(given.num_tokens, given.ROWS), num_parts):
        tokens = (tl.arange(0, given.ROWS) + tile * given.ROWS).to(tl.int64)
        inside = (tokens < given.num_tokens)[:, None] & (heads < H)[None, :]
        raw = _numbers(given.a, given.a_strides, tokens, given) + more
        made = tokens[:, None] * H + heads[None, :]
        of_g = -rate * tl.load(grad_g + made, mask=inside, other=0.0)
        arriving = tl.load(grad_other + made, mask=inside, other=0.0)
        of_log += tl.sum(of_g * softplus(raw), 0)
        if grad_b is not None:
            of_time = of_g
            beta = tl.sigmoid(_numbers(given.b, given.b_strides, tokens, given))
            of_beta = arriving * beta * (1.0 - beta)
            tl.store(grad_b + made, of_beta.to(grad_b.dtype.element_ty), mask=inside)
        else:
            of_time = of_g + arriving
        of_raw = of_time * tl.sigmoid(raw)
        of_bias += tl.sum(of_raw, 0)
        tl.store(grad_a + made, of_raw.to(grad_a.dtype.element_ty), mask=inside)
    start = parts + part * 2 * H
    tl.store(start + heads, of_log, mask=heads < H)
    tl.store(start + H + heads, of_bias, mask=heads < H)


class NormInputs(NamedTuple):
    """What both kernels of a gated norm read.

    The last six are constants: groups, their width, the power of two it is padded to, rows of a
    tile, whether each group has a weight of its own, and whether the gate is before the norm.
    """

    x: Any
    x_strides: Any
    gate: Any
    gate_strides: Any
    weight: Any
    num_rows: Any
    eps: Any
    E: Any
    D: Any
    BD: Any
    ROWS: Any
    OWN_WEIGHT: Any
    GATE_FIRST: Any


@triton.jit  # type: ignore[untyped-decorator]
def _features(x: tl.tensor, strides: tl.tuple, rows: tl.tensor, given: NormInputs) -> tl.tensor:
    """A tile of rows of the group of this program."""
    columns = tl.arange(0, given.BD)
    inside = (rows < given.num_rows)[:, None] & (columns < given.D)[None, :]
    place = rows[:, None] * strides[0] + tl.program_id(1) * strides[1]
    place += columns[None, :] * strides[2]
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(given: NormInputs) -> tl.tensor:
    """The weight of the group of this program, as a row."""
    columns, weight = tl.arange(0, given.BD), given.weight
    if given.OWN_WEIGHT:
        weight += tl.program_id(1) * given.D
    return tl.load(weight + columns, mask=columns < given.D, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(given: NormInputs, output: tl.tensor) -> None:
    """The gated norm of a tile of rows of one group."""
    group, columns = tl.program_id(1), tl.arange(0, given.BD)
    rows = tl.program_id(0).to(tl.int64) * given.ROWS + tl.arange(0, given.ROWS)
    inside = (rows < given.num_rows)[:, None] & (columns < given.D)[None, :]
    values = _features(given.x, given.x_strides, rows, given)
    z = _features(given.gate, given.gate_strides, rows, given)
    opened = z * tl.sigmoid(z)
    if given.GATE_FIRST:
        values *= opened
    normed = values * tl.rsqrt(tl.sum(values * values, 1) / given.D + given.eps)[:, None]
    # Rounded as often as in the models that these norms are of.
    dtype = given.x.dtype.element_ty
    result = _scale(given) * normed.to(dtype).to(tl.float32)
    if given.weight.dtype.element_ty == dtype:
        result = result.to(dtype).to(tl.float32)
    if not given.GATE_FIRST:
        result *= opened
    made = (rows[:, None] * given.E + group) * given.D + columns[None, :]
    tl.store(output + made, result.to(output.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(
    given: NormInputs,
    grad: tl.tensor,
    grad_x: tl.tensor,
    grad_gate: tl.tensor,
    parts: tl.tensor,
    num_parts: tl.tensor,
) -> None:
    """Gradients of the tiles of this program, and its sum of those of the weight."""
    E: tl.constexpr = given.E
    D: tl.constexpr = given.D
    part, group, columns = tl.program_id(0), tl.program_id(1), tl.arange(0, given.BD)
    scale, of_weight = _scale(given), tl.zeros([given.BD], tl.float32)
    for tile in range(part, tl.cdiv(given.num_rows, given.ROWS), num_parts):
        rows = (tl.arange(0, given.ROWS) + tile * given.ROWS).to(tl.int64)
        inside = (rows < given.num_rows)[:, None] & (columns < D)[None, :]
        raw = _features(given.x, given.x_strides, rows, given)
        z = _features(given.gate, given.gate_strides, rows, given)
        share = tl.sigmoid(z)
        opened = z * share
        made = (rows[:, None] * E + group) * D + columns[None, :]
        arriving = tl.load(grad + made, mask=inside, other=0.0).to(tl.float32)
        if given.GATE_FIRST:
            values, of_result = raw * opened, arriving
        else:
            values, of_result = raw, arriving * opened
        inverse = tl.rsqrt(tl.sum(values * values, 1) / D + given.eps)[:, None]
        normed = values * inverse
        of_weight += tl.sum(of_result * normed, 0)
        of_normed = of_result * scale
        mean = tl.sum(of_normed * normed, 1)[:, None] / D
        of_values = inverse * (of_normed - normed * mean)
        if given.GATE_FIRST:
            of_x, of_opened = of_values * opened, of_values * raw
        else:
            of_x, of_opened = of_values, arriving * normed * scale
        of_gate = of_opened * share * (1.0 + z * (1.0 - share))
        tl.store(grad_x + made, of_x.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_gate + made, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(parts + (part * E + group) * D + columns, of_weight, mask=columns < D)


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(
    parts: tl.tensor,
    total: tl.tensor,
    num_parts: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sums of columns, always in the same order."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_parts, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < num_parts)[:, None] & (columns < width)[None, :]
        found += tl.load(parts + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    result = tl.sum(found, 0).to(total.dtype.element_ty)
    tl.store(total + columns, result, mask=columns < width)
