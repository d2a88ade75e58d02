"""The gated MLP of a block."""

# Shape suffixes: T tokens, D width, F hidden width (this rank's share).

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Layout
from pcomm.integration.models.layer_builder import LayerBuilder

__all__ = ["SwiGLU", "swiglu"]


class SwiGLU(nn.Module):
    """`W_down(silu(W_gate x) * W_up x)`, the hidden width split over the tensor-parallel ranks.

    Gate and up come from one weight, so that a rank does one product and one communication.

    Args:
        build: Sizes, and the tensor-parallel group.
        hidden_width: Hidden width over all ranks; None for the model's `mlp_width`.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """

    def __init__(self, build: LayerBuilder, hidden_width: int | None = None) -> None:
        super().__init__()
        width = hidden_width or build.config.mlp_width
        assert width != "none", "a block without an MLP has no SwiGLU"
        hidden = build.split(width)
        self.gate_up = build.from_stream(Layout.sections([hidden, hidden]))
        self.down = build.to_stream(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over the tensor-parallel group."""
        y: Tensor = self.down(swiglu(self.gate_up(x)))
        return y


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone, and writes both gradients into one tensor without a copy."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        result_T2F = torch.empty_like(gate_up_T2F)
        for_gate_TF, for_up_TF = result_T2F.chunk(2, -1)
        torch.mul(gradients[0], F.silu(gate_TF), out=for_up_TF)
        through_silu_TF = gradients[0] * up_TF
        torch.ops.aten.silu_backward.grad_input(through_silu_TF, gate_TF, grad_input=for_gate_TF)
        return result_T2F


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` of two halves side by side; local.

    Args:
        gate_up_T2F: `[T, 2F]`, the gate first.

    Returns:
        `[T, F]`, same dtype.
    """
    if not (torch.is_grad_enabled() and gate_up_T2F.requires_grad):
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return F.silu(gate_TF).mul_(up_TF)
    result: Tensor = _SwiGLU.apply(gate_up_T2F)  # type: ignore[no-untyped-call]
    return result
