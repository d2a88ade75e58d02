"""The small layers, and what all layers are built with: norm, MLP, rotary embedding, builder."""

# Shape suffixes: T tokens, D width, F hidden width (this rank's share), H heads, K head dim,
# R rotation pairs.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Collectives, IdentityCollectives, Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, ParamLayout, RowParallelLinear
from pcomm.gdn_cp.ops import Kernels, choose_kernels
from pcomm.inference.layers import Norm, ResidualStream
from pcomm.integration.config.sections import ResolvedModel
from pcomm.ntp import Units

__all__ = [
    "LayerBuilder",
    "RMSNorm",
    "Rotation",
    "SwiGLU",
    "frequencies",
    "rotate",
    "rotation",
    "swiglu",
]


@dataclass(frozen=True)
class LayerBuilder:
    """Makes the parts of layers that read from the residual stream and write into it; local.

    Args:
        config: The shape of the model.
        collectives: Collectives of the tensor-parallel group.
        sequence_parallel: True to split the residual stream by tokens over that group.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        experts: Collectives of the expert-parallel group.
        state_dtype: Dtype of the states that recurrent layers keep of a request in inference; None
            for fp32, and for fp64 in a model of that.
        initialise: False allocates this rank's shards alone and leaves them as the memory was.
        form: Speed of each tensor-parallel rank, to which its share is proportional; empty for
            shares that are as equal as whole units can be.
    """

    config: ResolvedModel
    collectives: Collectives
    sequence_parallel: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    experts: Collectives = field(default_factory=IdentityCollectives)
    state_dtype: torch.dtype | None = None
    initialise: bool = True
    form: tuple[Fraction, ...] = ()

    def split(self, num_units: int, width: int = 1) -> Layout:
        """Whole units of `width` columns over the ranks, by their speeds.

        What belongs together is cut at the same units: query heads with the key head they read,
        for example. So the unit is the group, and its width is that of all its members.
        """
        if self.form:
            return Units.columns(num_units * width, block=width).layout(self.form)
        return Layout.cuts(num_units * width, self.collectives.size, unit=width)

    def own(self, layout: Layout) -> int:
        """How much of `layout` this rank has."""
        return layout.sizes[self.collectives.rank]

    def from_stream(self, layout: Layout, *, bias: bool = False) -> ColumnParallelLinear:
        """A projection from the residual stream."""
        return ColumnParallelLinear(
            self.config.width,
            layout,
            self.collectives,
            bias=bias,
            sequence_parallel=self.sequence_parallel,
            initialise=self.initialise,
            device=self.device,
            dtype=self.dtype,
        )

    def to_stream(self, layout: Layout) -> RowParallelLinear:
        """A projection back into it."""
        return RowParallelLinear(
            layout,
            self.config.width,
            self.collectives,
            sequence_parallel=self.sequence_parallel,
            initialise=self.initialise,
            device=self.device,
            dtype=self.dtype,
        )

    def stream_norm(self) -> RMSNorm:
        """A norm of the tokens of the residual stream that this rank has."""
        return self._norm(self.config.width, has_partial_gradient=self.sequence_parallel)

    def head_norm(self, width: int) -> RMSNorm:
        """A norm that all heads share, of which each rank has only some."""
        return self._norm(width, has_partial_gradient=True)

    def parameter(self, *shape: int, value: float = 0.0) -> nn.Parameter:
        """A parameter of this rank that starts with one value everywhere."""
        return nn.Parameter(torch.full(shape, value, device=self.device, dtype=self.dtype))

    def kernels(self) -> Kernels:
        """What runs the cores of recurrent layers, chosen by where the parameters are."""
        probe = torch.empty(0, device=self.device, dtype=self.dtype)
        return choose_kernels(probe.device, probe.dtype)

    def _norm(self, width: int, *, has_partial_gradient: bool) -> RMSNorm:
        return RMSNorm(
            width,
            self.config.norm_eps,
            is_zero_centred=self.config.norm_zero_centred,
            has_partial_gradient=has_partial_gradient and self.collectives.size > 1,
            device=self.device,
            dtype=self.dtype,
        )


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; local on every rank.

    Args:
        width: Length of the last dimension.
        eps: Added to the mean square.
        is_zero_centred: True to keep the weight as what is added to 1, which is done in fp32.
        has_partial_gradient: True if this rank normalises only some of the tokens or heads that
            share the weight, so that its gradient has to be summed over the ranks.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        is_zero_centred: bool = False,
        has_partial_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, is_zero_centred
        first = 0.0 if is_zero_centred else 1.0
        self.weight = nn.Parameter(torch.full((width,), first, device=device, dtype=dtype))
        self.param_layouts = {"weight": ParamLayout(has_partial_gradient=has_partial_gradient)}

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        if self.is_zero_centred:
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1.0 + self.weight.to(wide)
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        weight = self.weight
        if weight.dtype != x.dtype:
            # Under autocast. Torch has one kernel where the two are alike, and several otherwise.
            weight = weight.to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    @property
    def of_step(self) -> Norm:
        """What the kernels of a step are told of it."""
        return Norm(self.weight, self.eps, self.is_zero_centred)

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Values of the weight before training: a scale of 1; see `initialisation`."""
        return torch.zeros(shape) if self.is_zero_centred else torch.ones(shape)


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

    def step_on_device(self, stream: ResidualStream, norm: RMSNorm) -> None:
        """Add to the stream what its norm gives; collective over the tensor-parallel group."""
        stream.add_product(self.down, stream.gated_product(norm.of_step, self.gate_up))


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
    if torch.compiler.is_compiling():
        # A compiler fuses these, and their gradients.
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return F.silu(gate_TF) * up_TF
    if not (torch.is_grad_enabled() and gate_up_T2F.requires_grad):
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return F.silu(gate_TF).mul_(up_TF)
    result: Tensor = _SwiGLU.apply(gate_up_T2F)  # type: ignore[no-untyped-call]
    return result


Rotation = tuple[Tensor, Tensor]
"""Cosines `[T, 1, 1, R]`, and sines `[T, 1, 2, R]` with the sign of each half of a head."""


def frequencies(
    config: ResolvedModel, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """`[R]`, by what angle a position turns each pair of a head.

    Pair r of R turns by `theta ** (-r / R)`, slowed as `rope_scaling` says. In fp32, or in fp64 for
    a model in fp64.

    Args:
        config: Shape of the model.
        dtype: Dtype of the model.
        device: Device of the result.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021; `llama3`
        as in Llama 3.1, `transformers` 5.23.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    turned = int(config.head_dim * config.rotary_fraction)
    pairs_R = torch.arange(0, turned, 2, device=device, dtype=wide) / turned
    angles_R = config.rope_theta**-pairs_R
    if config.rope_scaling == "none":
        return angles_R
    slowed_R = angles_R / config.rope_factor
    if config.rope_scaling == "linear":
        return slowed_R
    low, high = config.rope_low_frequency, config.rope_high_frequency
    turns_R = config.rope_original_context * angles_R / (2 * math.pi)
    kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return slowed_R + kept_R * (angles_R - slowed_R)


def rotation(positions_T: Tensor, frequencies_R: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines by which heads at `positions_T` are turned; local.

    Args:
        positions_T: Integers, the position of each token in its sequence.
        frequencies_R: Frequencies of the pairs, from `frequencies`.
        dtype: Dtype of the result, that of the heads; angles are computed in that of the
            frequencies.
    """
    angles_T11R = positions_T.view(-1, 1, 1, 1) * frequencies_R
    sines_T11R = angles_T11R.sin().to(dtype)
    return angles_T11R.cos().to(dtype), torch.cat([-sines_T11R, sines_T11R], -2)


def rotate(x_THK: Tensor, turn: Rotation) -> Tensor:
    """Heads turned by their positions; the pairs are element r and element r + R.

    What is behind the first 2 R elements of a head stays as it is.
    """
    cos_T11R, sin_T12R = turn
    if cos_T11R.dtype != x_THK.dtype:
        # Under autocast.
        cos_T11R, sin_T12R = cos_T11R.to(x_THK.dtype), sin_T12R.to(x_THK.dtype)
    turned = 2 * cos_T11R.shape[-1]
    if turned < x_THK.shape[-1]:
        head, rest = x_THK.split([turned, x_THK.shape[-1] - turned], -1)
        return torch.cat([rotate(head, turn), rest], -1)
    # Named, since a rank without tokens has no elements to divide by.
    x_TH2R = x_THK.view(*x_THK.shape[:-1], 2, turned // 2)
    return torch.addcmul(x_TH2R * cos_T11R, x_TH2R.flip(-2), sin_T12R).view_as(x_THK)
