"""Layers of transformers, run by our cores on packed sequences, with the layer's own parameters.

For comparisons of results and of speed. Nothing is imported from transformers here.
"""

# T tokens, D hidden size

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gdn_cp_bench.slow_decay import slow_parameters
from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution
from pcomm.gdn_cp.ops.gated_delta_rule import chunk_gated_delta_rule, delta_gates
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd
from pcomm.gdn_cp.ops.norms import gate_then_rms_norm, normalise_queries_keys, rms_norm_then_gate

LayerRun = Callable[[Any, Tensor, Sequence[int]], Tensor]


def gated_delta_net_of_cores(layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """`Qwen3NextGatedDeltaNet` on packed sequences, `[T, D]` to `[T, D]`."""
    projected = (layer.in_proj_qkvz(hidden_TD[None]), layer.in_proj_ba(hidden_TD[None]))
    q, k, v, z, b, a = (x[0] for x in layer.fix_query_key_value_ordering(*projected))
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
    mixed, _ = causal_convolution(mixed, layer.conv1d.weight[:, 0], cu_seqlens=cu_seqlens)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (x.unflatten(-1, (layer.num_k_heads, -1)) for x in (q, k))
    v = v.unflatten(-1, (layer.num_v_heads, -1))
    g, beta = delta_gates(a, b, layer.A_log, layer.dt_bias)
    output, _ = chunk_gated_delta_rule(
        *normalise_queries_keys(q, k), v, g, beta, cu_seqlens=cu_seqlens
    )
    normed = rms_norm_then_gate(output, z, layer.norm.weight, eps=layer.norm.variance_epsilon)
    result: Tensor = layer.out_proj(normed.flatten(1))
    return result


def mamba2_of_cores(layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """`Mamba2Mixer` on packed sequences, `[T, D]` to `[T, D]`."""
    inner, groups = layer.intermediate_size, layer.n_groups
    states = groups * layer.ssm_state_size
    sizes = [inner, inner + 2 * states, layer.num_heads]
    gate, mixed, dt = layer.in_proj(hidden_TD).split(sizes, -1)
    weight, bias = layer.conv1d.weight[:, 0], layer.conv1d.bias
    mixed, _ = causal_convolution(mixed, weight, cu_seqlens=cu_seqlens, bias_D=bias)
    x, b, c = mixed.split([inner, states, states], -1)
    y, _ = chunk_mamba2_ssd(
        x.unflatten(-1, (layer.num_heads, -1)),
        dt,
        layer.A_log,
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
        d_H=layer.D,
        dt_bias_H=layer.dt_bias,
        cu_seqlens=cu_seqlens,
    )
    eps = layer.norm.variance_epsilon
    normed = gate_then_rms_norm(y.flatten(1), gate, layer.norm.weight, num_groups=groups, eps=eps)
    result: Tensor = layer.out_proj(normed)
    return result


def one_by_one(layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """The layer's own code, which knows no packs, on every sequence by itself."""
    cuts = pairwise(cu_seqlens)
    return torch.cat([layer(hidden_TD[None, start:stop])[0] for start, stop in cuts])


@torch.no_grad()
def set_slow(layer: Any, *, seed: int = 0) -> None:
    """Draw all parameters anew: slow decay, and no bias or norm that a mistake could hide in."""
    generator = torch.Generator().manual_seed(seed)
    module: nn.Module = layer
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        # Rows of a projection keep the size of what goes through them.
        parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else drawn)
    log, bias = slow_parameters(len(layer.A_log), generator, layer.A_log.dtype)
    layer.A_log.copy_(log)
    layer.dt_bias.copy_(bias)
