"""The Mamba-2 mixer of a block."""

# Shape suffixes: T tokens, C channels of the convolution, H heads, P head dim, G groups,
# S state dim. Heads, groups and channels are this rank's share.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.placement import Placement
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.gdn_cp.cores.convolution import causal_convolution, convolution_step
from pcomm.gdn_cp.cores.norms import gate_then_rms_norm
from pcomm.gdn_cp.cores.state_space import chunk_state_space
from pcomm.gdn_cp.cores.state_space_recurrent import state_space_step
from pcomm.integration.config import ModelConfig
from pcomm.integration.models.context import Context, RecurrentCache

__all__ = ["Mamba2"]

# Time steps before training, log-uniform between these, as in Mamba.
_SHORTEST, _LONGEST = 1e-3, 1e-1


class Mamba2(nn.Module):
    """A state space with one decay for each head; heads and groups are split over the ranks.

    Gate, input, input and output matrices and time steps come from one weight. All but gate and
    time steps go through a causal convolution; state and convolution begin anew with each sequence.

    Args:
        config: With every size filled in.
        collectives: Of the tensor-parallel group.
        sequence_parallel: Whether input and output are this rank's share of the tokens.
        index: Which layer's cache is ours.
        device: Where the parameters are.
        dtype: Of the parameters.

    Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060.
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
        head_dim, state_dim = config.mamba_head_dim, config.mamba_state_dim
        inner = Layout.even(config.mamba_heads * head_dim, size, unit=head_dim)
        groups = Layout.even(config.mamba_groups * state_dim, size, unit=state_dim)
        heads = Layout.even(config.mamba_heads, size)
        channels = Layout.sections([inner, groups, groups])
        self.index, self.eps = index, config.norm_eps
        self.head_dim, self.state_dim = head_dim, state_dim
        self.num_groups = groups.sizes[rank] // state_dim
        self.inner, self.group_width, self.num_heads = (
            layout.sizes[rank] for layout in (inner, groups, heads)
        )
        self.input = ColumnParallelLinear(
            config.width,
            Layout.sections([inner, inner, groups, groups, heads]),
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.output = RowParallelLinear(
            inner,
            config.width,
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        num_channels = channels.sizes[rank]
        self.conv_weight = nn.Parameter(
            torch.empty(num_channels, config.conv_width, device=device, dtype=dtype)
        )
        self.conv_bias = nn.Parameter(torch.zeros(num_channels, device=device, dtype=dtype))
        self.a_log = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=dtype))
        self.d = nn.Parameter(torch.ones(self.num_heads, device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.ones(self.inner, device=device, dtype=dtype))
        nn.init.normal_(self.conv_weight, std=config.conv_width**-0.5)
        self.placements = {
            "conv_weight": Placement(channels),
            "conv_bias": Placement(channels),
            "a_log": Placement(heads),
            "dt_bias": Placement(heads),
            "d": Placement(heads),
            "norm_weight": Placement(inner),
        }

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over the tensor-parallel group."""
        num_channels = self.inner + 2 * self.group_width
        z, mixed_TC, dt_TH = self.input(x).split([self.inner, num_channels, self.num_heads], -1)
        if context.cache is None:
            y_THP = self._mix(mixed_TC, dt_TH, context.sequences.cu_seqlens, None)
        else:
            cache = context.cache[self.index]
            assert isinstance(cache, RecurrentCache)
            y_THP = self._continue(mixed_TC, dt_TH, cache)
        gated = gate_then_rms_norm(
            y_THP.flatten(-2), z, self.norm_weight, num_groups=self.num_groups, eps=self.eps
        )
        output: Tensor = self.output(gated)
        return output

    def new_cache(self, max_tokens: int) -> RecurrentCache:
        """What this layer keeps of a sequence while text is written; its size is fixed."""
        return RecurrentCache()

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

    def _mix(
        self,
        mixed_TC: Tensor,
        dt_TH: Tensor,
        cu_seqlens: tuple[int, ...],
        cache: RecurrentCache | None,
    ) -> Tensor:
        convolved_TC, halo = causal_convolution(
            mixed_TC, self.conv_weight, cu_seqlens=cu_seqlens, bias_D=self.conv_bias
        )
        x_THP, b_TGS, c_TGS = self._heads(convolved_TC)
        y_THP, state = chunk_state_space(
            x_THP,
            dt_TH,
            self.a_log,
            b_TGS,
            c_TGS,
            d_H=self.d,
            dt_bias_H=self.dt_bias,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None:
            cache.halo, cache.state = halo, state
        return y_THP

    def _continue(self, mixed_TC: Tensor, dt_TH: Tensor, cache: RecurrentCache) -> Tensor:
        """The prompt first, then one token at a time."""
        if cache.halo is None or cache.state is None:
            return self._mix(mixed_TC, dt_TH, (0, len(mixed_TC)), cache)
        assert len(mixed_TC) == 1, "a prompt is read at once, then token by token"
        convolved, cache.halo = convolution_step(
            mixed_TC, cache.halo, self.conv_weight, bias_D=self.conv_bias
        )
        x, b, c = self._heads(convolved)
        y, cache.state = state_space_step(
            cache.state, x, dt_TH, self.a_log, b, c, d_H=self.d, dt_bias_H=self.dt_bias
        )
        return y

    def _heads(self, convolved_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, b, c = convolved_TC.split([self.inner, self.group_width, self.group_width], -1)
        return (
            x.unflatten(-1, (-1, self.head_dim)),
            b.unflatten(-1, (-1, self.state_dim)),
            c.unflatten(-1, (-1, self.state_dim)),
        )
