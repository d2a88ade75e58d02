"""The mixers' short convolution, causal and one filter a channel, with SiLU, over packed sequences.

All tokens are convolved as if they were one sequence, by W shifted products. Then the few tokens
whose window reaches over the start of their sequence are computed again from what really came
before them: zeros, or a *halo*, the W - 1 inputs before the start. Backward is the same the other
way round, and the weights' gradient takes those tokens from their own windows too.
"""

# T tokens, N sequences, D channels, W width of the filter, P = W - 1 tokens before a token

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.ops.entry import (
    apply_function,
    check_shape,
    check_tokens,
    compute_dtype,
    differentiable_once,
    graph_break,
)
from pcomm.gdn_cp.pack_offsets import PackOffsets

__all__ = ["boundary_indices", "causal_convolution", "check_convolution", "convolution_step"]


@graph_break
def causal_convolution(
    x_TD: Tensor,
    weight_DW: Tensor,
    *,
    cu_seqlens: Sequence[int],
    bias_D: Tensor | None = None,
    initial_halo: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`silu(convolution(x) + bias)` of each sequence, and the inputs that its continuation needs.

    Computes in fp32, and in fp64 for fp64 inputs. Differentiable once.

    Args:
        x_TD: `[T, D]` inputs, any strides.
        weight_DW: `[D, W]` filters; the last column meets the token itself.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        bias_D: `[D]`, or nothing.
        initial_halo: `[N, W - 1, D]`, the inputs before each sequence; zeros by default.

    Returns:
        `[T, D]` in the dtype of `x_TD`, and the halo after each sequence, `[N, W - 1, D]` in the
        same: its last inputs, preceded by those of `initial_halo` where it is shorter.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Weight, bias or halo of another shape.
    """
    offsets, (num_channels, width) = PackOffsets.of(cu_seqlens), weight_DW.shape
    check_convolution("causal_convolution", offsets, x_TD, weight_DW, bias_D, initial_halo)
    shape = (len(offsets) - 1, width - 1, num_channels)
    halo = x_TD.new_zeros(shape) if initial_halo is None else initial_halo.to(x_TD.dtype)
    boundaries = offsets.derived(boundary_indices, width, x_TD.device)
    dtype = compute_dtype(x_TD)
    weight, bias = weight_DW.to(dtype), None if bias_D is None else bias_D.to(dtype)
    inputs = (x_TD.to(dtype), weight, bias, halo.to(dtype), boundaries)
    y: Tensor = apply_function(_Convolution, *inputs)
    return y.to(x_TD.dtype), _last_inputs(x_TD, halo, boundaries)


def check_convolution(
    asked: str,
    offsets: PackOffsets,
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo_NPD: Tensor | None,
) -> None:
    """Inputs, filters, bias and halo are of one pack and have matching channels."""
    num_channels, width = weight_DW.shape
    check_tokens(asked, offsets, x=x_TD)
    check_shape(f"{asked}: x", x_TD, (len(x_TD), num_channels))
    if bias_D is not None:
        check_shape(f"{asked}: bias", bias_D, (num_channels,))
    if halo_NPD is not None:
        shape = (len(offsets) - 1, width - 1, num_channels)
        check_shape(f"{asked}: initial_halo", halo_NPD, shape)


def convolution_step(
    x_ND: Tensor, halo_NPD: Tensor, weight_DW: Tensor, *, bias_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: its convolution with SiLU, and the next halo.

    Args:
        x_ND: `[N, D]` inputs.
        halo_NPD: `[N, W - 1, D]`, the inputs before them; not changed.
        weight_DW: `[D, W]` filters.
        bias_D: `[D]`, or nothing.

    Returns:
        `[N, D]` and `[N, W - 1, D]`, in the dtype of `x_ND`.
    """
    dtype = compute_dtype(x_ND)
    window_NWD = torch.cat([halo_NPD.to(x_ND.dtype), x_ND.unsqueeze(1)], 1)
    y_ND = (window_NWD.to(dtype) * weight_DW.to(dtype).mT).sum(1)
    if bias_D is not None:
        y_ND = y_ND + bias_D.to(dtype)
    return F.silu(y_ND).to(x_ND.dtype), window_NWD[:, 1:]


class BoundaryIndices(NamedTuple):
    """Where the first and the last W - 1 tokens of each sequence are.

    For `head` and `tail`: the token of each of `[N, P]` places, some other token where the
    sequence is too short; whether there is one; and, of those there are, the places and tokens.
    """

    head_NP: Tensor
    in_head_NP1: Tensor
    head_places: Tensor
    head_tokens: Tensor
    tail_NP: Tensor
    in_tail_NP1: Tensor
    tail_places: Tensor
    tail_tokens: Tensor
    lengths_N: Tensor


def boundary_indices(offsets: tuple[int, ...], width: int, device: torch.device) -> BoundaryIndices:
    """The first and last tokens of each sequence, on a device; kept by `PackOffsets.derived`."""
    offsets_N1 = torch.tensor(offsets, dtype=torch.int64)
    starts, stops = offsets_N1[:-1], offsets_N1[1:]
    places_P = torch.arange(width - 1)
    last = max(offsets[-1] - 1, 0)
    found: list[Tensor] = []
    head_NP, tail_NP = starts[:, None] + places_P, stops[:, None] - width + 1 + places_P
    for tokens_NP, inside_NP in (
        (head_NP, head_NP < stops[:, None]),
        (tail_NP, tail_NP >= starts[:, None]),
    ):
        tokens_NP = tokens_NP.clamp(0, last)
        places = inside_NP.flatten().nonzero().flatten()
        found += [tokens_NP, inside_NP.unsqueeze(-1), places, tokens_NP.flatten()[places]]
    return BoundaryIndices(*(x.to(device) for x in (*found, stops - starts)))


def _last_inputs(x_TD: Tensor, halo_NPD: Tensor, boundaries: BoundaryIndices) -> Tensor:
    """The last W - 1 inputs of each sequence, those of the halo counted in."""
    num_before = halo_NPD.shape[1]
    if not len(x_TD):
        return halo_NPD
    places_P = torch.arange(num_before, device=x_TD.device)
    older_NP = (places_P + boundaries.lengths_N[:, None]).clamp(max=max(num_before - 1, 0))
    older_NPD = halo_NPD.gather(1, older_NP.unsqueeze(-1).expand_as(halo_NPD))
    return torch.where(boundaries.in_tail_NP1, x_TD[boundaries.tail_NP], older_NPD)


def _windows(x: Tensor, tokens_NP: Tensor, inside_NP1: Tensor) -> Tensor:
    """`[N, P, D]`: these tokens, zeros where a sequence has no such token."""
    if not len(x):
        return x.new_zeros(*tokens_NP.shape, x.shape[-1])
    return x[tokens_NP].masked_fill_(~inside_NP1, 0)


def _filtered(windows_NQD: Tensor, taps_WD: Tensor) -> Tensor:
    """`[N, P, D]` from `Q = 2 P` places: each is the sum over w of place + w times tap w."""
    num_places = len(taps_WD) - 1
    total = windows_NQD[:, :num_places] * taps_WD[0]
    for w in range(1, len(taps_WD)):
        total.addcmul_(windows_NQD[:, w : w + num_places], taps_WD[w])
    return total


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        halo: Tensor,
        boundaries: BoundaryIndices,
    ) -> Tensor:
        taps = weight.mT.contiguous()
        num_before = len(taps) - 1
        before = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
        for shift in range(1, len(taps)):
            before[shift:].addcmul_(x[: max(len(x) - shift, 0)], taps[num_before - shift])
        heads = torch.cat([halo, _windows(x, boundaries.head_NP, boundaries.in_head_NP1)], 1)
        again = _filtered(heads, taps).add_(0 if bias is None else bias)
        again = again.flatten(0, 1).index_select(0, boundaries.head_places)
        before.index_copy_(0, boundaries.head_tokens, again)
        ctx.save_for_backward(x, taps, before, heads)
        ctx.boundaries, ctx.has_bias = boundaries, bias is not None
        return F.silu(before)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, before, heads = ctx.saved_tensors
        boundaries, num_before = ctx.boundaries, len(taps) - 1
        grad = torch.ops.aten.silu_backward(grads[0], before)
        grad_bias = grad.sum(0) if ctx.has_bias else None

        grad_x = grad * taps[-1]
        for shift in range(1, len(taps)):
            kept = max(len(x) - shift, 0)
            grad_x[:kept].addcmul_(grad[shift:], taps[num_before - shift])
        tails = F.pad(
            _windows(grad, boundaries.tail_NP, boundaries.in_tail_NP1), (0, 0, 0, num_before)
        )
        again = _filtered(tails, taps.flip(0))
        again = again.flatten(0, 1).index_select(0, boundaries.tail_places)
        grad_x.index_copy_(0, boundaries.tail_tokens, again)

        grad_heads = _windows(grad, boundaries.head_NP, boundaries.in_head_NP1)
        grad_halo = torch.zeros_like(grad_heads)
        for w in range(num_before):
            grad_halo[:, w:].addcmul_(grad_heads[:, : num_before - w], taps[w])
        grad.index_fill_(0, boundaries.head_tokens, 0)
        grad_taps = torch.empty_like(taps)
        for w in range(len(taps)):
            shift = num_before - w
            grad_taps[w] = (grad[shift:] * x[: max(len(x) - shift, 0)]).sum(0)
            grad_taps[w] += (grad_heads * heads[:, w : w + num_before]).sum((0, 1))
        return grad_x, grad_taps.mT, grad_bias, grad_halo, None
