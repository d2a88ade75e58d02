"""Small functional mixers that run on a plan, and layers of them: for one rank and for many.

They show which operation of a plan belongs where. Decays are slow, so that a state which gets lost
between ranks, or leaks from a document to the next, changes results by far.
"""

# t tokens between layers, T tokens of the core, D model dim, H heads, N sequences

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gdn_cp_bench.slow_decay import slow_parameters
from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution
from pcomm.gdn_cp.ops.gated_delta_rule import DeltaChunks, delta_gates
from pcomm.gdn_cp.ops.mamba2_ssd import SsdChunks
from pcomm.gdn_cp.ops.norms import normalise_queries_keys, rms_norm_then_gate
from pcomm.gdn_cp.plan import Plan
from pcomm.gdn_cp.specs import AttentionSpec, GdnSpec, Mamba2Spec, Spec
from pcomm.gdn_cp.token_layout import TokenLayout

__all__ = [
    "CHUNK",
    "LayerResults",
    "SequenceStates",
    "continued",
    "in_pack_order",
    "layer_stack",
    "mixer",
    "run_layers",
    "sum_over_ranks",
    "weights_of",
    "world",
]


# Short, so that tests of a few dozen tokens have several chunks and odd remainders.
CHUNK = 4


class SequenceStates(NamedTuple):
    """What sequences take from a pack to the next, of all heads and the same on every rank.

    Args:
        states: `[N, H, key dim, value dim]`.
        halo: `[N, conv_width - 1, channels]`.
    """

    states: Tensor
    halo: Tensor


# Output and gradient of this rank's tokens, and this rank's gradients of the parameters.
LayerResults = tuple[list[Tensor], list[Tensor]]


def world() -> dist.ProcessGroup:
    """The default group, where the test has one."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_layers(
    plan: Plan, specs: Sequence[Spec], hidden_dim: int, *, dtype: torch.dtype = torch.float64
) -> LayerResults:
    """Forward and backward of layers in a row, with the same numbers on every rank."""
    generator = torch.Generator().manual_seed(3)
    shape = (plan.tokens.num_tokens, hidden_dim)
    hidden, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x = plan.shard(hidden).clone().requires_grad_()
    weights = [weights_of(spec, hidden_dim, dtype=dtype, seed=n) for n, spec in enumerate(specs)]
    y = layer_stack(plan, specs, x, weights)
    leaves = [x, *(leaf for own in weights for leaf in own.values())]
    # On a rank without documents some parameters meet nothing.
    grads = torch.autograd.grad(y, leaves, plan.shard(upstream), materialize_grads=True)
    return [y.detach(), grads[0]], list(grads[1:])


def layer_stack(
    plan: Plan, specs: Sequence[Spec], x_tD: Tensor, weights: Sequence[dict[str, Tensor]]
) -> Tensor:
    """`[t, D]`: each mixer on the sum of the input and the outputs before it."""
    for spec, own in zip(specs, weights, strict=True):
        x_tD = x_tD + mixer(plan, spec, x_tD, own)
    return x_tD


def mixer(plan: Plan, spec: Spec, hidden_tD: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The output of one layer, `[t, D]`, for this rank's tokens."""
    x = plan.enter(spec, hidden_tD)
    sections = _sections(spec, x, weights)
    if isinstance(spec, AttentionSpec):
        y = plan.from_heads(spec, _attention(plan, spec, sections))
        return plan.leave(spec, F.linear(y, weights["out"]))
    assert isinstance(spec, GdnSpec | Mamba2Spec), "a mixer that weights_of does not know"
    y, _ = _recurrence(plan, spec, sections, weights, None)
    return _gated(plan, spec, x, y, weights)


def continued(
    plan: Plan,
    spec: GdnSpec | Mamba2Spec,
    hidden_tD: Tensor,
    weights: dict[str, Tensor],
    before: SequenceStates | None,
) -> tuple[Tensor, SequenceStates]:
    """The output of one layer for sequences that began in other packs, and what goes on from it."""
    x = plan.enter(spec, hidden_tD)
    y, after = _recurrence(plan, spec, _sections(spec, x, weights), weights, before)
    states, halo = before or (None, None)
    # Final states and halo as this rank's core has them, then those of all.
    whole = SequenceStates(
        plan.final_states(spec, after.states, initial=states),
        plan.final_halo(spec, after.halo, initial=halo),
    )
    return _gated(plan, spec, x, y, weights), whole


def _sections(spec: Spec, x: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    return [F.linear(x, weights[f"in_{section.name}"]) for section in spec.sections]


def _gated(
    plan: Plan, spec: GdnSpec | Mamba2Spec, x: Tensor, y: Tensor, weights: dict[str, Tensor]
) -> Tensor:
    y = plan.from_heads(spec, y)
    # The gate has stayed here, with the tokens that the output is back at.
    z = F.linear(x, weights["in_z"])
    y, z = (part.unflatten(-1, (spec.output.num_heads, -1)) for part in (y, z))
    y = rms_norm_then_gate(y, z, weights["norm"]).flatten(1)
    return plan.leave(spec, F.linear(y, weights["out"]))


def _recurrence(
    plan: Plan,
    spec: GdnSpec | Mamba2Spec,
    sections: list[Tensor],
    weights: dict[str, Tensor],
    before: SequenceStates | None,
) -> tuple[Tensor, SequenceStates]:
    """`[T, columns]` of this rank's heads, and states and halo after what its core sees."""
    inputs, *gates = plan.to_heads(spec, sections, fused=3)
    states, halo = before or (None, None)
    first, second, third, last = _convolved(plan, spec, inputs, weights, halo)
    share, offsets = plan.head_share(spec), plan.cu_seqlens_of(spec)
    # The last section is what the decay is made of.
    names = ("A_log", "dt_bias")
    log, bias = (share.take(weights[name], spec.sections[-1].name) for name in names)
    if isinstance(spec, GdnSpec):
        b, a = gates
        q, k = normalise_queries_keys(first, second)
        g, beta = delta_gates(a, b, log, bias)
        delta = DeltaChunks.of(k, third, g, beta, cu_seqlens=offsets, chunk=CHUNK)
        summary = delta.summary() if plan.needs_summary(spec) else None
        start = plan.entry_states(spec, summary, initial=states)
        y, final = delta.outputs(q, initial_state=start)
    else:
        space = SsdChunks.of(
            first, gates[0], log, second, dt_bias_H=bias, cu_seqlens=offsets, chunk=CHUNK
        )
        summary = space.summary() if plan.needs_summary(spec) else None
        start = plan.entry_states(spec, summary, initial=states)
        skip = share.take(weights["D"], "dt")
        y, final = space.outputs(third, d_H=skip, initial_state=start)
    return y.flatten(1), SequenceStates(final, last)


def _convolved(
    plan: Plan,
    spec: GdnSpec | Mamba2Spec,
    x: Tensor,
    weights: dict[str, Tensor],
    halo: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three sections with their heads apart, and the halo after them."""
    share, names = plan.head_share(spec), [section.name for section in spec.sections[:3]]
    y, last = causal_convolution(
        x,
        share.take(weights["conv"], names),
        cu_seqlens=plan.cu_seqlens_of(spec),
        initial_halo=plan.conv_halo(spec, x, initial=halo),
    )
    first, second, third = share.split(y, names)
    return first, second, third, last


def _attention(plan: Plan, spec: AttentionSpec, sections: list[Tensor]) -> Tensor:
    q, k, v = (
        x.unflatten(-1, (-1, spec.head_dim)).transpose(0, 1) for x in plan.to_heads(spec, sections)
    )
    # As little of a rotary embedding as makes results depend on the place in the sequence.
    phase = (plan.positions_of(spec, q.device)[:, None] * 0.3).to(q.dtype)
    q, k = q * phase.cos(), k * (1 + phase.sin())
    parts = [
        F.scaled_dot_product_attention(
            q[:, a:b], k[:, a:b], v[:, a:b], is_causal=True, enable_gqa=True
        )
        for a, b in pairwise(plan.cu_seqlens_of(spec))
        if b > a
    ]
    return torch.cat([*parts, q[:, :0]], 1).transpose(0, 1).flatten(1)


def weights_of(
    spec: Spec, hidden_dim: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Whole parameters, the same for a seed, that want their gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        scale = 1 / math.sqrt(shape[-1])
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    widths = {section.name: section.width for section in spec.sections}
    found = {f"in_{name}": normal(width, hidden_dim) for name, width in widths.items()}
    found["out"] = normal(hidden_dim, spec.output.width)
    if isinstance(spec, GdnSpec | Mamba2Spec):
        num_heads = spec.output.num_heads
        found["in_z"] = normal(spec.output.width, hidden_dim)
        found["conv"] = normal(spec.convolution.channels, spec.convolution.width)
        found["norm"] = 1 + normal(spec.output.head_width)
        found["A_log"], found["dt_bias"] = slow_parameters(num_heads, generator, torch.float64)
    if isinstance(spec, Mamba2Spec):
        found["D"] = normal(spec.num_heads)
    return {name: value.to(dtype).requires_grad_() for name, value in found.items()}


def in_pack_order(tokens: TokenLayout, parts: Sequence[Tensor]) -> Tensor:
    """Tensors of all ranks, `[t, ...]` each, as one in the order of the pack."""
    whole = torch.cat([*parts])
    return torch.empty_like(whole).index_copy_(0, tokens.order, whole)


def sum_over_ranks(of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum over the ranks of each of their tensors."""
    return [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]
