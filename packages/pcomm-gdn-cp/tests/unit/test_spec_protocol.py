"""A kind of mixer that this package does not know is one file: a specification and its transition.

Here it is gated linear attention with a decay for each key channel: S <- diag(a) S + k v^T and
o = S^T q. No code of the package mentions it, and every strategy that its facts allow runs it.
"""

# t tokens between layers, T tokens of the core, D model dim, H heads, G key heads, K key dim,
# V value dim, F segments

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_support.planned_mixers import in_pack_order
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError
from pcomm.core.testing.virtual import run_virtual
from pcomm.gdn_cp import (
    Convolution,
    Plan,
    RecurrentState,
    ScalarTransition,
    Section,
    Spec,
    make_plan,
)
from pcomm.gdn_cp.ops import causal_convolution

DIM, BOUND = 6, 1e-12
PACK = (0, 8, 8, 20, 48)


@dataclass(frozen=True)
class DiagonalTransition:
    """M has one number for each row of a state."""

    def shape(self, key_dim: int) -> tuple[int, int]:
        return (key_dim, 1)

    def apply(self, summary: tuple[Tensor, Tensor], state: Tensor) -> Tensor:
        decay, written = summary
        return decay * state + written


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated linear attention, with a short convolution over queries and keys if it has a width."""

    num_key_heads: int = 2
    num_heads: int = 4
    key_dim: int = 3
    value_dim: int = 5
    conv_width: int = 0

    @property
    def sections(self) -> tuple[Section, ...]:
        return (
            Section("q", self.num_key_heads, self.key_dim),
            Section("k", self.num_key_heads, self.key_dim),
            Section("v", self.num_heads, self.value_dim),
            Section("gate", self.num_heads, self.key_dim),
        )

    @property
    def output(self) -> Section:
        return Section("output", self.num_heads, self.value_dim)

    @property
    def state(self) -> RecurrentState:
        return RecurrentState(self.num_heads, self.key_dim, self.value_dim, DiagonalTransition())

    @property
    def convolution(self) -> Convolution | None:
        return Convolution(self.conv_width, self.sections[:2]) if self.conv_width else None


SPECS = [LinearAttentionSpec(), LinearAttentionSpec(conv_width=3)]


def core(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, a_THK: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence or segment, token by token: what is read, and the state after it."""
    read = [v_THV[:0]]
    for q, k, v, a in zip(q_THK, k_THK, v_THV, a_THK, strict=True):
        state_HKV = a[..., None] * state_HKV + k[..., None] * v[..., None, :]
        read.append((q[..., None] * state_HKV).sum(-2)[None])
    return torch.cat(read), state_HKV


def layer(
    plan: Plan, spec: LinearAttentionSpec, x_tD: Tensor, weights: dict[str, Tensor]
) -> Tensor:
    """The output of one layer, `[t, D]`, with the operations of a plan that every mixer calls."""
    x = plan.enter(spec, x_tD)
    qk, *rest = plan.to_heads(spec, [F.linear(x, weights[s.name]) for s in spec.sections], fused=2)
    share, cuts = plan.head_share(spec), plan.cu_seqlens_of(spec)
    if spec.convolution is not None:
        halo = plan.conv_halo(spec, qk)
        filters = share.take(weights["filters"], spec.convolution.names)
        qk, _ = causal_convolution(qk, filters, cu_seqlens=cuts, initial_halo=halo)
    q, k = share.split(qk, ("q", "k"))
    v, gate = (x.unflatten(-1, (share.output.num_heads, -1)) for x in rest)
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
    tensors = (q, k, v, gate.sigmoid() * 0.2 + 0.8)
    parts = [tuple(x[a:b] for x in tensors) for a, b in pairwise(cuts)]
    nothing = x.new_zeros(len(parts), v.shape[1], spec.key_dim, spec.value_dim)
    states = nothing
    if plan.needs_summary(spec):
        written = torch.stack([core(*part, nothing[0])[1] for part in parts])
        decay = torch.stack([a.prod(0)[..., None] for *_, a in parts])
        entered = plan.entry_states(spec, (decay, written))
        assert entered is not None
        states = entered
    read = [core(*part, state)[0] for part, state in zip(parts, states, strict=True)]
    y = plan.from_heads(spec, torch.cat([v[:0], *read]).flatten(1))
    return plan.leave(spec, F.linear(y, weights["out"]))


def run(group: Collectives, spec: LinearAttentionSpec, **options: Any) -> tuple[Plan, list[Tensor]]:
    """The plan; output and gradient of this rank's tokens, and the gradients of the weights."""
    plan = make_plan(PACK, group, spec, hidden_dim=DIM, **options).prepare("cpu")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {s.name: normal(s.width, DIM).requires_grad_() for s in spec.sections}
    weights["out"] = normal(DIM, spec.output.width).requires_grad_()
    if spec.convolution is not None:
        shape = (spec.convolution.channels, spec.convolution.width)
        weights["filters"] = normal(*shape).requires_grad_()
    x = plan.shard(normal(PACK[-1], DIM)).requires_grad_()
    upstream = plan.shard(normal(PACK[-1], DIM))
    y = layer(plan, spec, x, weights)
    wanted = [x, *weights.values()]
    grads = torch.autograd.grad(y, wanted, upstream, materialize_grads=True)
    return plan, [y.detach(), *grads]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("strategy", ["heads", "docs", "state", "gather"])
@pytest.mark.parametrize("spec", SPECS, ids=["without convolution", "with convolution"])
def test_a_mixer_of_ones_own_on_two_ranks_is_the_mixer_on_one(
    spec: LinearAttentionSpec, strategy: str, layout: str
) -> None:
    _, expected = run(IdentityCollectives(), spec)
    results = run_virtual(lambda group: run(group, spec, strategy=strategy, layout=layout), 2)
    plans, found = zip(*results, strict=True)
    assert plans[0].strategy_of(spec) == strategy
    tokens = plans[0].tokens
    for n, whole in enumerate(expected):
        parts = [of_rank[n] for of_rank in found]
        # Output and gradient of the tokens lie on the ranks; gradients of weights add up.
        together = in_pack_order(tokens, parts) if n < 2 else torch.stack(parts).sum(0)
        assert relative_error([together], [whole]) < BOUND


def test_what_it_sends_follows_from_its_facts() -> None:
    spec = SPECS[1]
    plan = make_plan(PACK, (0, 2), spec, strategy="state", layout="contiguous", element_bytes=8)
    # One sequence is cut: two inputs of 12 channels, and a map of 4 heads, [3, 1] and [3, 5], fp32.
    assert plan.traffic(spec).forward_bytes == 2 * 12 * 8 + 4 * (3 + 15) * 4
    assert isinstance(spec, Spec)


@dataclass(frozen=True)
class Contradiction(LinearAttentionSpec):
    """A specification with one fact that does not fit the others."""

    fact: str = ""

    @property
    def sections(self) -> tuple[Section, ...]:
        q, k, v, gate = super().sections
        if self.fact == "name":
            return q, q, v, gate
        return (replace(q, num_heads=3), k, v, gate) if self.fact == "heads" else (q, k, v, gate)

    @property
    def state(self) -> RecurrentState:
        return RecurrentState(2 if self.fact == "state" else 4, 3, 5, ScalarTransition())

    @property
    def convolution(self) -> Convolution | None:
        return Convolution(3, (Section("u", 4, 2),)) if self.fact == "convolution" else None


@pytest.mark.parametrize(
    ("fact", "found"),
    [
        ("name", "two have one name"),
        ("heads", "4 heads of the output and 3 of 'q'"),
        ("state", "a state of 2 heads and an output of 4"),
        ("convolution", r"a convolution of \('u',\)"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(fact: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        make_plan(PACK, (0, 2), Contradiction(fact=fact))


def test_states_and_halos_of_a_mixer_that_has_none_are_refused() -> None:
    plan = make_plan(PACK, (0, 2), SPECS[0], strategy="state")
    with pytest.raises(ConfigError, match="made with a pair of numbers"):
        plan.conv_halo(SPECS[0], torch.zeros(24, 12))
    alone = make_plan(PACK, (0, 1), SPECS[0])
    assert alone.conv_halo(SPECS[0], torch.zeros(48, 12)) is None
    with pytest.raises(ConfigError, match="a mixer without a convolution"):
        alone.conv_halo(SPECS[0], torch.zeros(48, 12), initial=torch.zeros(4, 2, 12))
    with pytest.raises(ConfigError, match="a mixer without a convolution"):
        alone.final_halo(SPECS[0], torch.zeros(4, 2, 12))
