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
from pcomm.gdn_cp.ops.backend import Kernels

LayerRun = Callable[[Any, Tensor, Sequence[int]], Tensor]
_TORCH = Kernels("torch", "asked for")


def gated_delta_net_of_cores(
    layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int], kernels: Kernels = _TORCH
) -> Tensor:
    """`Qwen3NextGatedDeltaNet` on packed sequences, `[T, D]` to `[T, D]`."""
    projected = (layer.in_proj_qkvz(hidden_TD[None]), layer.in_proj_ba(hidden_TD[None]))
    q, k, v, z, b, a = (x[0] for x in layer.fix_query_key_value_ordering(*projected))
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
    heads = ((layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim))
    q, k, v = kernels.convolve_sections(
        mixed,
        layer.conv1d.weight[:, 0],
        (heads[0], heads[0], heads[1]),
        cu_seqlens=cu_seqlens,
        normalise=True,
    )
    g, beta = kernels.delta_gates(a, b, layer.A_log, layer.dt_bias)
    output, _ = kernels.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)
    eps = layer.norm.variance_epsilon
    normed = kernels.rms_norm_then_gate(output, z, layer.norm.weight, eps=eps)
    result: Tensor = layer.out_proj(normed.flatten(1))
    return result


def mamba2_of_cores(
    layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int], kernels: Kernels = _TORCH
) -> Tensor:
    """`Mamba2Mixer` on packed sequences, `[T, D]` to `[T, D]`."""
    inner, groups = layer.intermediate_size, layer.n_groups
    states = groups * layer.ssm_state_size
    sizes = [inner, inner + 2 * states, layer.num_heads]
    gate, mixed, dt = layer.in_proj(hidden_TD).split(sizes, -1)
    of_state = (groups, layer.ssm_state_size)
    x, b, c = kernels.convolve_sections(
        mixed,
        layer.conv1d.weight[:, 0],
        ((layer.num_heads, inner // layer.num_heads), of_state, of_state),
        cu_seqlens=cu_seqlens,
        bias_D=layer.conv1d.bias,
    )
    y, _ = kernels.chunk_mamba2_ssd(
        *(x, dt, layer.A_log, b, c),
        d_H=layer.D,
        dt_bias_H=layer.dt_bias,
        cu_seqlens=cu_seqlens,
    )
    eps, weight = layer.norm.variance_epsilon, layer.norm.weight
    normed = kernels.gate_then_rms_norm(y.flatten(1), gate, weight, num_groups=groups, eps=eps)
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
