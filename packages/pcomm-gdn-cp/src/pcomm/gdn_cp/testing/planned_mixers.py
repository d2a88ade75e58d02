"""Small functional mixers that run on a plan, for tests: the same code on one rank and on many.

They show which operation of a plan belongs where. Decays are slow, so that a state which gets lost
between ranks, or leaks from a document to the next, changes results by far.
"""

# t tokens between layers, T tokens of the core, D model dim, H heads, N sequences

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.layer_moves import Plan
from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks
from pcomm.gdn_cp.ops.gated_delta_rule.gate import delta_gates
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import SsdChunks
from pcomm.gdn_cp.ops.norms import normalise_queries_keys, rms_norm_then_gate
from pcomm.gdn_cp.specs.attention import AttentionSpec
from pcomm.gdn_cp.specs.gated_delta_net import GdnSpec
from pcomm.gdn_cp.specs.mamba2 import Mamba2Spec
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.testing.slow_decay import slow_parameters

__all__ = ["CHUNK", "SequenceStates", "continued", "mixer", "weights_of"]

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
