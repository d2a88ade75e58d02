"""The Gated DeltaNet mixer of a block, as in Qwen3-Next."""

# Shape suffixes: T tokens, C channels of the convolution, G key heads, H value heads, K key dim,
# V value dim, W width of the convolution. Heads and channels are this rank's share.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pcomm.core import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.gdn_cp import GdnSpec, HeadShare, Plan
from pcomm.gdn_cp.ops import (
    delta_gates,
    gated_delta_step,
    graph_break,
    normalise_queries_keys,
)
from pcomm.inference import StateMemory, StateSpec
from pcomm.integration.models.forward_context import (
    Context,
    StepContext,
    advance,
    convolve,
    state_spec,
)
from pcomm.integration.models.layers import LayerBuilder

__all__ = ["GatedDeltaNet"]

_CONVOLVED = ("q", "k", "v")


class GatedDeltaNet(nn.Module):
    """Linear attention with a decaying, corrected state; heads are split over the ranks.

    Queries, keys, values, gate and the two numbers of each head (b, a) come from one weight.
    Queries, keys and values go through a causal convolution; state and convolution begin anew
    with each sequence.

    Args:
        build: Sizes, and the tensor-parallel group.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config = build.config
        key_dim, value_dim = config.gdn_key_dim, config.gdn_value_dim
        # A key head and the value heads that it serves lie on one rank.
        count, served = config.gdn_key_heads, config.gdn_value_heads // config.gdn_key_heads
        keys, values = build.split(count, key_dim), build.split(count, served * value_dim)
        heads = build.split(count, served)
        channels = Layout.sections([keys, keys, values])
        self.sizes = [build.own(n) for n in (keys, keys, values, values, heads, heads)]
        self.spec = GdnSpec(
            self.sizes[0] // key_dim, build.own(heads), key_dim, value_dim, config.conv_width
        )
        self.all_heads = HeadShare(self.spec, 1, 0)
        self.eps, self.kernels = config.norm_eps, build.kernels()
        self.state_dtype = build.state_dtype
        self.input = build.from_stream(Layout.sections([keys, keys, values, values, heads, heads]))
        self.output = build.to_stream(values)
        self.conv_weight = build.parameter(build.own(channels), config.conv_width)
        self.a_log = build.parameter(build.own(heads))
        self.dt_bias = build.parameter(build.own(heads), value=1.0)
        self.norm_weight = build.parameter(value_dim, value=1.0)
        nn.init.normal_(self.conv_weight, std=config.conv_width**-0.5)
        self.param_layouts = {
            "conv_weight": ParamLayout(channels),
            "a_log": ParamLayout(heads),
            "dt_bias": ParamLayout(heads),
            # All heads share it, and each rank has only some heads.
            "norm_weight": ParamLayout(has_partial_gradient=build.collectives.size > 1),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over tensor- and context-parallel group."""
        spec = self.spec
        q, k, v, z, b, a = self.input(context.enter(spec, x)).split(self.sizes, -1)
        # The gate stays with the tokens that the output comes back to.
        return context.leave(spec, self._gated(self._mixed([q, k, v, b, a], context.plan), z))

    @graph_break
    def _mixed(self, parts: Sequence[Tensor], plan: Plan) -> Tensor:
        """What the recurrence makes of the projections, in their place; see `Attention._mixed`."""
        spec, share = self.spec, plan.head_share(self.spec)
        mixed_TC, b_TH, a_TH = plan.to_heads(spec, parts, fused=3)
        q, k, v = self.kernels.convolve_sections(
            mixed_TC,
            share.take(self.conv_weight, _CONVOLVED),
            share.shapes(_CONVOLVED),
            cu_seqlens=plan.cu_seqlens_of(spec),
            initial_halo=plan.conv_halo(spec, mixed_TC),
            normalise=True,
        )
        parameters = (share.take(parameter, "a") for parameter in (self.a_log, self.dt_bias))
        gates = self.kernels.delta_gates(a_TH, b_TH, *parameters)
        o_THV = self._recur(q, k, v, *gates, plan)
        return plan.from_heads(spec, o_THV.flatten(-2))

    def step(self, x: Tensor, context: StepContext, memory: StateMemory) -> Tensor:
        """The same for the new tokens of many requests, whose states are in `memory`.

        Collective over the tensor-parallel group.
        """
        sizes = [sum(self.sizes[:3]), *self.sizes[3:]]
        mixed_TC, z, b, a = self.input(x).split(sizes, -1)
        convolved_TC = convolve(context, memory, mixed_TC, self.conv_weight)
        q, k, v = self.all_heads.split(convolved_TC, _CONVOLVED)
        # The last bits of exponentials depend on the place in the batch; those of fp64 vanish here.
        wide = torch.promote_types(x.dtype, torch.float32)
        exact = delta_gates(a.double(), b.double(), self.a_log, self.dt_bias)
        gates = [gate.to(wide) for gate in exact]
        o_THV = advance(
            "state",
            context,
            memory,
            (*normalise_queries_keys(q, k), v, *gates),
            one_token=lambda state, *inputs: gated_delta_step(state.to(wide), *inputs),
            chunks=lambda state, *inputs: self.kernels.chunk_gated_delta_rule(
                *inputs[:-1], cu_seqlens=inputs[-1], initial_state=state
            ),
            is_apart=True,
        )
        return self._gated(o_THV.flatten(-2), z)

    @property
    def memory_spec(self) -> StateSpec:
        """What this layer keeps of a request on this rank."""
        return state_spec(self.spec, self.conv_weight.dtype, self.state_dtype)

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Values of the whole parameter `name` before training; see `initialisation`.

        Decays start between 1 and 16 per unit of time step, as in Mamba-2 and Gated DeltaNet.
        """
        if name == "a_log":
            return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
        if name == "conv_weight":
            return torch.empty(shape).normal_(0.0, math.sqrt(1 / shape[1]), generator=generator)
        return torch.ones(shape)

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, g_TH: Tensor, beta_TH: Tensor, plan: Plan
    ) -> Tensor:
        """`[T, H, V]`; where sequences go on on other ranks, from the states they leave there."""
        cu_seqlens = plan.cu_seqlens_of(self.spec)
        if not plan.needs_summary(self.spec):
            kernels = self.kernels
            return kernels.chunk_gated_delta_rule(q, k, v, g_TH, beta_TH, cu_seqlens=cu_seqlens)[0]
        chunks = self.kernels.delta_chunks(k, v, g_TH, beta_TH, cu_seqlens=cu_seqlens)
        start = plan.entry_states(self.spec, chunks.summary())
        return chunks.outputs(q, initial_state=start)[0]

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Into the residual stream."""
        o_THV, z_THV = (x.unflatten(-1, (-1, self.spec.value_dim)) for x in (o, z))
        weight = self.norm_weight
        gated_THV = self.kernels.rms_norm_then_gate(o_THV, z_THV, weight, eps=self.eps)
        output: Tensor = self.output(gated_THV.flatten(-2))
        return output
