"""The Mamba-2 mixer of a block."""

# Shape suffixes: T tokens, C channels of the convolution, H heads, P head dim, G groups,
# S state dim. Heads, groups and channels are this rank's share.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.gdn_cp import HeadShare, Mamba2Spec, Plan
from pcomm.gdn_cp.ops import (
    graph_break,
    mamba2_ssd_step,
)
from pcomm.inference import StateMemory, StateSpec
from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.models.forward_context import (
    Context,
    StepContext,
    advance,
    convolve,
    state_spec,
)
from pcomm.integration.models.layers import LayerBuilder

__all__ = ["Mamba2"]

_CONVOLVED = ("x", "B", "C")

# Time steps before training, log-uniform between these, as in Mamba.
_SHORTEST, _LONGEST = 1e-3, 1e-1


class _Heads(NamedTuple):
    """Parameters with one entry for each head, `[H]`."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor


class Mamba2(nn.Module):
    """A state space with one decay for each head; heads and groups are split over the ranks.

    Gate, input, input and output matrices and time steps come from one weight. All but gate and
    time steps go through a causal convolution; state and convolution begin anew with each sequence.

    Args:
        build: Sizes, and the tensor-parallel group.

    Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config = build.config
        head_dim, state_dim = config.mamba_head_dim, config.mamba_state_dim
        # A group and the heads that share its matrices lie on one rank.
        count, sharing = config.mamba_groups, config.mamba_heads // config.mamba_groups
        inner, groups = build.split(count, sharing * head_dim), build.split(count, state_dim)
        heads = build.split(count, sharing)
        channels = Layout.sections([inner, groups, groups])
        sections = [inner, inner, groups, groups, heads]
        self.sizes = [build.own(layout) for layout in sections]
        num_heads, num_channels = build.own(heads), build.own(channels)
        num_groups = build.own(groups) // state_dim
        self.spec = Mamba2Spec(num_heads, head_dim, num_groups, state_dim, config.conv_width)
        self.all_heads = HeadShare(self.spec, 1, 0)
        self.eps, self.kernels = config.norm_eps, build.kernels()
        self.state_dtype = build.state_dtype
        self.limits = _limits_before_softplus(config)
        self.input = build.from_stream(Layout.sections(sections))
        self.output = build.to_stream(inner)
        self.conv_weight = build.parameter(num_channels, config.conv_width)
        self.conv_bias = build.parameter(num_channels) if config.mamba_conv_bias else None
        self.a_log = build.parameter(num_heads)
        self.dt_bias = build.parameter(num_heads)
        self.d = build.parameter(num_heads, value=1.0)
        self.norm_weight = build.parameter(build.own(inner), value=1.0)
        nn.init.normal_(self.conv_weight, std=config.conv_width**-0.5)
        self.param_layouts = {
            "conv_weight": ParamLayout(channels),
            "conv_bias": ParamLayout(channels),
            "a_log": ParamLayout(heads),
            "dt_bias": ParamLayout(heads),
            "d": ParamLayout(heads),
            "norm_weight": ParamLayout(inner),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over tensor- and context-parallel group."""
        spec = self.spec
        z, x, b, c, dt = self.input(context.enter(spec, x)).split(self.sizes, -1)
        # The gate stays with the tokens that the output comes back to.
        return context.leave(spec, self._gated(self._mixed([x, b, c, dt], context.plan), z))

    @graph_break
    def _mixed(self, parts: Sequence[Tensor], plan: Plan) -> Tensor:
        """What the scan makes of the projections, in their place; see `Attention._mixed`."""
        spec, share = self.spec, plan.head_share(self.spec)
        mixed_TC, dt_TH = plan.to_heads(spec, parts, fused=3)
        x, b, c = self.kernels.convolve_sections(
            mixed_TC,
            share.take(self.conv_weight, _CONVOLVED),
            share.shapes(_CONVOLVED),
            cu_seqlens=plan.cu_seqlens_of(spec),
            bias_D=None if self.conv_bias is None else share.take(self.conv_bias, _CONVOLVED),
            initial_halo=plan.conv_halo(spec, mixed_TC),
        )
        heads = _Heads(*(share.take(p, "dt") for p in (self.a_log, self.dt_bias, self.d)))
        y_THP = self._recur(x, b, c, self._limited(dt_TH, heads.dt_bias), heads, plan)
        return plan.from_heads(spec, y_THP.flatten(-2))

    def step(self, x: Tensor, context: StepContext, memory: StateMemory) -> Tensor:
        """The same for the new tokens of many requests, whose states are in `memory`.

        Collective over the tensor-parallel group.
        """
        inner, heads = self.sizes[0], _Heads(self.a_log, self.dt_bias, self.d)
        z, mixed_TC, dt_TH = self.input(x).split([inner, sum(self.sizes[1:4]), self.sizes[4]], -1)
        convolved_TC = convolve(context, memory, mixed_TC, self.conv_weight, self.conv_bias)
        y_THP = advance(
            "state",
            context,
            memory,
            (*self.all_heads.split(convolved_TC, _CONVOLVED), self._limited(dt_TH, self.dt_bias)),
            one_token=lambda state, x, b, c, dt: self._one_token(state, x, b, c, dt, heads),
            chunks=lambda state, x, b, c, dt, cu_seqlens: self._scan(
                x, b, c, dt, heads, cu_seqlens, state
            ),
            is_apart=True,
        )
        return self._gated(y_THP.flatten(-2), z)

    @property
    def memory_spec(self) -> StateSpec:
        """What this layer keeps of a request on this rank."""
        return state_spec(self.spec, self.conv_weight.dtype, self.state_dtype)

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Values of the whole parameter `name` before training; see `initialisation`."""
        if name == "a_log":
            return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
        if name == "conv_weight":
            return torch.empty(shape).normal_(0.0, math.sqrt(1 / shape[1]), generator=generator)
        if name == "conv_bias":
            return torch.zeros(shape)
        if name == "dt_bias":
            span = math.log(_SHORTEST), math.log(_LONGEST)
            time = torch.empty(shape).uniform_(*span, generator=generator).exp()
            # The inverse of softplus, which the layer applies.
            return time + torch.log(-torch.expm1(-time))
        return torch.ones(shape)

    def _recur(
        self, x: Tensor, b: Tensor, c: Tensor, dt_TH: Tensor, heads: _Heads, plan: Plan
    ) -> Tensor:
        """`[T, H, P]`; where sequences go on on other ranks, from the states they leave there."""
        cu_seqlens = plan.cu_seqlens_of(self.spec)
        if not plan.needs_summary(self.spec):
            return self._scan(x, b, c, dt_TH, heads, cu_seqlens)[0]
        chunks = self.kernels.ssd_chunks(
            x, dt_TH, heads.a_log, b, dt_bias_H=heads.dt_bias, cu_seqlens=cu_seqlens
        )
        start = plan.entry_states(self.spec, chunks.summary())
        return chunks.outputs(c, d_H=heads.d, initial_state=start)[0]

    def _one_token(
        self, state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt_NH: Tensor, heads: _Heads
    ) -> tuple[Tensor, Tensor]:
        """Outputs and states of one token of each of N sequences."""
        state = state.to(torch.promote_types(x.dtype, torch.float32))
        return mamba2_ssd_step(
            state, x, dt_NH, heads.a_log, b, c, d_H=heads.d, dt_bias_H=heads.dt_bias
        )

    def _scan(
        self,
        x: Tensor,
        b: Tensor,
        c: Tensor,
        dt_TH: Tensor,
        heads: _Heads,
        cu_seqlens: tuple[int, ...],
        state_NHSP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final states of sequences that go on from `state_NHSP`, or begin."""
        return self.kernels.chunk_mamba2_ssd(
            x,
            dt_TH,
            heads.a_log,
            b,
            c,
            d_H=heads.d,
            dt_bias_H=heads.dt_bias,
            cu_seqlens=cu_seqlens,
            initial_state=state_NHSP,
        )

    def _limited(self, dt_TH: Tensor, dt_bias_H: Tensor) -> Tensor:
        """Time steps as projected, such that those after bias and softplus keep their limits."""
        if self.limits is None:
            return dt_TH
        wide = torch.promote_types(dt_TH.dtype, torch.float32)
        bias_H = dt_bias_H.to(wide)
        return (dt_TH.to(wide) + bias_H).clamp(*self.limits) - bias_H

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Into the residual stream."""
        groups = self.spec.num_groups
        weight = self.norm_weight
        gated = self.kernels.gate_then_rms_norm(y, z, weight, num_groups=groups, eps=self.eps)
        output: Tensor = self.output(gated)
        return output


def _limits_before_softplus(config: ResolvedModel) -> tuple[float, float] | None:
    """What has to lie between these for a time step to keep its limits; None without limits."""
    low, high = config.mamba_min_time_step, config.mamba_max_time_step
    if not low and high == "none":
        return None
    # Softplus is monotone, so limits of its result are limits of its argument.
    inverse = [
        x + math.log(-math.expm1(-x)) if x else -math.inf for x in (low, high) if x != "none"
    ]
    return inverse[0], inverse[1] if len(inverse) > 1 else math.inf
