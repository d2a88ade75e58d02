"""The Gated DeltaNet mixer of a block, as in Qwen3-Next."""

# Shape suffixes: T tokens, C channels of the convolution, G key heads, H value heads, K key dim,
# V value dim, W width of the convolution. Heads and channels are this rank's share.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.placement import Placement
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.gdn_cp.cores.convolution import causal_convolution, convolution_step
from pcomm.gdn_cp.cores.gated_delta import (
    chunk_gated_delta_rule,
    delta_gates,
    normalise_queries_keys,
)
from pcomm.gdn_cp.cores.gated_delta_recurrent import gated_delta_step
from pcomm.gdn_cp.cores.norms import rms_norm_then_gate
from pcomm.integration.config import ModelConfig
from pcomm.integration.models.context import Context, RecurrentCache

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(nn.Module):
    """Linear attention with a decaying, corrected state; heads are split over the ranks.

    Queries, keys, values, gate and the two numbers of each head (b, a) come from one weight.
    Queries, keys and values go through a causal convolution; state and convolution begin anew
    with each sequence.

    Args:
        config: With every size filled in.
        collectives: Of the tensor-parallel group.
        sequence_parallel: Whether input and output are this rank's share of the tokens.
        index: Which layer's cache is ours.
        device: Where the parameters are.
        dtype: Of the parameters.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464.
    """

    def __init__(
        self,
        config: ModelConfig,
        collectives: Collectives,
        *,
        sequence_parallel: bool,
        index: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size, rank = collectives.size, collectives.rank
        key_dim, value_dim = config.gdn_key_dim, config.gdn_value_dim
        keys = Layout.even(config.gdn_key_heads * key_dim, size, unit=key_dim)
        values = Layout.even(config.gdn_value_heads * value_dim, size, unit=value_dim)
        heads = Layout.even(config.gdn_value_heads, size)
        channels = Layout.sections([keys, keys, values])
        self.index, self.eps = index, config.norm_eps
        self.key_dim, self.value_dim = key_dim, value_dim
        self.sizes = [n.sizes[rank] for n in (keys, keys, values, values, heads, heads)]
        self.input = ColumnParallelLinear(
            config.width,
            Layout.sections([keys, keys, values, values, heads, heads]),
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.output = RowParallelLinear(
            values,
            config.width,
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        num_heads = heads.sizes[rank]
        self.conv_weight = nn.Parameter(
            torch.empty(channels.sizes[rank], config.conv_width, device=device, dtype=dtype)
        )
        self.a_log = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.ones(value_dim, device=device, dtype=dtype))
        nn.init.normal_(self.conv_weight, std=config.conv_width**-0.5)
        self.placements = {
            "conv_weight": Placement(channels),
            "a_log": Placement(heads),
            "dt_bias": Placement(heads),
            # All heads share it, and each rank has only some heads.
            "norm_weight": Placement(has_partial_gradient=size > 1),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over the tensor-parallel group."""
        projected = self.input(x)
        num_channels = sum(self.sizes[:3])
        mixed_TC, z, b_TH, a_TH = projected.split([num_channels, *self.sizes[3:]], -1)
        g_TH, beta_TH = delta_gates(a_TH, b_TH, self.a_log, self.dt_bias)
        if context.cache is None:
            o_THV = self._mix(mixed_TC, g_TH, beta_TH, context.sequences.cu_seqlens, None)
        else:
            cache = context.cache[self.index]
            assert isinstance(cache, RecurrentCache)
            o_THV = self._continue(mixed_TC, g_TH, beta_TH, cache)
        gated_THV = rms_norm_then_gate(
            o_THV, z.unflatten(-1, (-1, self.value_dim)), self.norm_weight, eps=self.eps
        )
        output: Tensor = self.output(gated_THV.flatten(-2))
        return output

    def new_cache(self, max_tokens: int) -> RecurrentCache:
        """What this layer keeps of a sequence while text is written; its size is fixed."""
        return RecurrentCache()

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Values of the whole parameter `name` before training; see `initialisation`.

        Decays start between 1 and 16 per unit of time step, as in Mamba-2 and Gated DeltaNet.
        """
        if name == "a_log":
            return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
        if name == "conv_weight":
            return torch.empty(shape).normal_(0.0, math.sqrt(1 / shape[1]), generator=generator)
        return torch.ones(shape)

    def _mix(
        self,
        mixed_TC: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        cu_seqlens: tuple[int, ...],
        cache: RecurrentCache | None,
    ) -> Tensor:
        convolved_TC, halo = causal_convolution(mixed_TC, self.conv_weight, cu_seqlens=cu_seqlens)
        q, k, v = self._heads(convolved_TC)
        o_THV, state = chunk_gated_delta_rule(
            *normalise_queries_keys(q, k), v, g_TH, beta_TH, cu_seqlens=cu_seqlens
        )
        if cache is not None:
            cache.halo, cache.state = halo, state
        return o_THV

    def _continue(
        self, mixed_TC: Tensor, g_TH: Tensor, beta_TH: Tensor, cache: RecurrentCache
    ) -> Tensor:
        """The prompt first, then one token at a time."""
        if cache.halo is None or cache.state is None:
            return self._mix(mixed_TC, g_TH, beta_TH, (0, len(mixed_TC)), cache)
        assert len(mixed_TC) == 1, "a prompt is read at once, then token by token"
        convolved, cache.halo = convolution_step(mixed_TC, cache.halo, self.conv_weight)
        q, k, v = self._heads(convolved)
        o, cache.state = gated_delta_step(
            cache.state, *normalise_queries_keys(q, k), v, g_TH, beta_TH
        )
        return o

    def _heads(self, convolved_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = convolved_TC.split(self.sizes[:3], -1)
        dims = (self.key_dim, self.key_dim, self.value_dim)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip((q, k, v), dims, strict=True))
        return q, k, v
