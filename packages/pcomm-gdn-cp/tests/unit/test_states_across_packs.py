"""Two packs in a row, with the states of the first carried over, against one long pack on one rank.

Every rank has a loss of its own, so that the gradients are those of the sum of all of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import offsets, relative_error
from gdn_cp_support.planned_mixers import (
    SequenceStates,
    continued,
    in_pack_order,
    sum_over_ranks,
    weights_of,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, make_plan

# Heads that 2 and 3 ranks divide; on 3, a rank may need parts of two groups of value heads.
GDN, MAMBA = GdnSpec(2, 6, 3, 5), Mamba2Spec(6, 3, 2, 5)
Mixer = GdnSpec | Mamba2Spec
DIM = 6
# Roundings of values near one, over some hundred additions in another order; see test_plan_layers.
BOUND, BROKEN = 1e-12, 1e-3

# Sequences that begin, end or do both in either pack, and one without a token. For zigzag they are
# padded; else they are also shorter than the convolution, and cut anywhere.
PADDED = ((24, 0, 12, 0, 36), (12, 24, 0, 0, 48))
AWKWARD = ((5, 0, 3, 0, 10), (1, 7, 0, 0, 4))
PACKS = {"zigzag": PADDED, "contiguous": AWKWARD}
# Eleven documents on twelve ranks leave one without a token; then one is cut besides.
LEFT_OUT = ([12] * 11, [12] * 5 + [24] + [12] * 4 + [0])

Packs = tuple[Any, Any]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def carried(spec: Mixer, num_sequences: int, seed: int) -> SequenceStates:
    return SequenceStates(
        random(num_sequences, *spec.state.shape, seed=seed),
        random(num_sequences, spec.conv_width - 1, spec.convolution.channels, seed=seed + 1),
    )


def in_the_long_pack(packs: Packs) -> list[Tensor]:
    """The tokens of each pack, by their places in the pack of the joined sequences."""
    whole = offsets([a + b for a, b in zip(*packs, strict=True)])
    starts = [whole[:-1], [s + a for s, a in zip(whole[:-1], packs[0], strict=True)]]
    return [
        torch.cat([torch.arange(s, s + n) for s, n in zip(begin, lengths, strict=True)])
        for begin, lengths in zip(starts, packs, strict=True)
    ]


def leaves(before: SequenceStates | None) -> SequenceStates | None:
    return before and SequenceStates(*(x.clone().requires_grad_() for x in before))


def on_one(spec: Mixer, packs: Packs, size: int, before: SequenceStates | None) -> list[Tensor]:
    """Outputs and states of one long pack, then the gradients of all losses of `size` ranks."""
    places, total = in_the_long_pack(packs), sum(map(sum, packs))
    plan = make_plan(offsets([a + b for a, b in zip(*packs, strict=True)]), (0, 1), spec)
    x, weights, start = random(total, DIM, seed=1).requires_grad_(), weights_of(spec, DIM), None
    start = leaves(before)
    y, after = continued(plan, spec, x, weights, start)
    arriving = [carried(spec, len(packs[0]), 10 + 2 * rank) for rank in range(size)]
    upstream = [random(total, DIM, seed=2), *map(sum, zip(*arriving, strict=True))]
    inputs = [x, *(start or ()), *weights.values()]
    grad_x, *grads = torch.autograd.grad([y, *after], inputs, upstream)  # type: ignore[arg-type]
    tokens = [part[place] for part in (y, grad_x) for place in places]
    return [x.detach() for x in (*tokens, *after, *grads)]


def on_ranks(
    spec: Mixer,
    packs: Packs,
    size: int,
    before: SequenceStates | None,
    strategies: Any,
    layout: str,
) -> list[Tensor]:
    places = in_the_long_pack(packs)
    hidden, upstream = (random(sum(map(sum, packs)), DIM, seed=seed) for seed in (1, 2))

    def on_rank(group: VirtualCollectives) -> Any:
        plans = [
            make_plan(
                offsets(lengths), group, spec, strategy=strategy, layout=layout, hidden_dim=DIM
            )  # type: ignore[arg-type]
            for lengths, strategy in zip(packs, strategies, strict=True)
        ]
        inputs, outputs, arriving = [], [], []
        weights, start = weights_of(spec, DIM), leaves(before)
        now = start
        for plan, place in zip(plans, places, strict=True):
            inputs.append(plan.shard(hidden[place]).clone().requires_grad_())
            y, now = continued(plan, spec, inputs[-1], weights, now)
            outputs.append(y)
            arriving.append(plan.shard(upstream[place]))
        assert now is not None
        own = carried(spec, len(packs[0]), 10 + 2 * group.rank)
        wanted = [*inputs, *(start or ()), *weights.values()]
        # On a rank without documents some weights meet nothing.
        grads = torch.autograd.grad(
            [*outputs, *now], wanted, [*arriving, *own], materialize_grads=True
        )
        return plans, [x.detach() for x in (*outputs, *grads[:2])], list(now), grads[2:]

    results = run_virtual(on_rank, size)
    tokens = [
        in_pack_order(results[0][0][i % 2].tokens, [r[1][i] for r in results]) for i in range(4)
    ]
    for other in results[1:]:
        for mine, first in zip(other[2], results[0][2], strict=True):
            assert_equal(mine, first)
    sums = sum_over_ranks([r[3] for r in results])
    return [*tokens, *(x.detach() for x in results[0][2]), *sums]


def off(
    spec: Mixer, size: int, strategies: Any, layout: str, *, begins: bool = False, packs: Any = None
) -> float:
    packs = packs or PACKS[layout]
    before = None if begins else carried(spec, len(packs[0]), 5)
    expected = on_one(spec, packs, size, before)
    return relative_error(on_ranks(spec, packs, size, before, strategies, layout), expected)


ALL = ("heads", "docs", "state", "gather")


@pytest.mark.parametrize(
    ("spec", "strategies", "size", "layout", "options"),
    [
        (GDN, ("heads", "heads"), 1, "zigzag", {}),
        (MAMBA, ("state", "state"), 1, "contiguous", {}),
        # Every strategy with either layout; a mixer is of weight where it says what a map is.
        *((GDN, (one, one), 3, "zigzag", {}) for one in ("heads", "state")),
        *((GDN, (one, one), 3, "contiguous", {}) for one in ("docs", "gather")),
        (GDN, ("state", "state"), 2, "contiguous", {}),
        *((MAMBA, (one, one), 3, "contiguous", {}) for one in ("heads", "state")),
        *((MAMBA, (one, one), 2, "zigzag", {}) for one in ("docs", "gather")),
        # The first pack of all starts from nothing.
        *((GDN, (one, one), 2, "contiguous", {"begins": True}) for one in ALL),
        # The second one may take another strategy.
        *((GDN, pair, 3, "zigzag", {}) for pair in pairwise(ALL[:1] + ALL[2:0:-1] + ALL[3:])),
        # A rank without tokens takes part.
        *((one, ("docs", "docs"), 12, "contiguous", {"packs": LEFT_OUT}) for one in (GDN, MAMBA)),
    ],
    ids=str,
)
def test_two_packs_are_one_long_pack(
    spec: Mixer, strategies: Any, size: int, layout: str, options: Any
) -> None:
    assert off(spec, size, strategies, layout, **options) < BOUND


@pytest.mark.parametrize("strategy", ALL)
def test_a_pack_without_a_token_hands_on_what_it_was_given(strategy: str) -> None:
    def on_rank(group: VirtualCollectives) -> None:
        plan = make_plan((0, 0, 0), group, GDN, strategy=strategy)  # type: ignore[arg-type]
        before, weights = carried(GDN, 2, 5), weights_of(GDN, DIM)
        _, after = continued(plan, GDN, torch.zeros(0, DIM).double(), weights, before)
        assert_equal(after.states.detach(), before.states)
        assert_equal(after.halo.detach(), before.halo)

    run_virtual(on_rank, 2)


# -- what is sent, and what is refused -------------------------------------------------------


STRATEGIES_AND_SIZES = pytest.mark.parametrize(
    ("strategy", "size"),
    [("heads", 1), ("state", 1), ("heads", 2), ("docs", 3), ("state", 3), ("gather", 2)],
)


@STRATEGIES_AND_SIZES
def test_states_cost_a_gather_each_and_initial_ones_nothing(strategy: str, size: int) -> None:
    def on_rank(group: VirtualCollectives) -> None:
        spy = SpyCollectives(group)
        plan = make_plan(
            offsets(PADDED[0]), spy, GDN, strategy=strategy, hidden_dim=DIM, element_bytes=8
        )  # type: ignore[arg-type]
        weights, before = weights_of(GDN, DIM), leaves(carried(GDN, 5, 5))
        x = plan.shard(random(72, DIM, seed=1)).requires_grad_()
        y, after = continued(plan, GDN, x, weights, before)
        traffic, extra = plan.traffic(GDN), 0 if strategy == "gather" or size == 1 else 2
        counts = {name: traffic.forward.count(name) for name in traffic.forward}
        counts["all_gather"] = counts.get("all_gather", 0) + extra
        assert spy.counts == {name: count for name, count in counts.items() if count}
        spy.clear()
        (y.sum() + after.states.sum() + after.halo.sum()).backward()
        counts = {name: traffic.backward.count(name) for name in traffic.backward}
        counts["reduce_scatter"] = counts.get("reduce_scatter", 0) + extra
        assert spy.counts == {name: count for name, count in counts.items() if count}

    run_virtual(on_rank, size)


@STRATEGIES_AND_SIZES
def test_states_that_do_not_fit_are_refused_before_anything_is_sent(
    strategy: str, size: int
) -> None:
    def on_rank(group: VirtualCollectives) -> None:
        attention = AttentionSpec(6, 2, 4)
        plan = make_plan(offsets([12] * 6), group, [GDN, attention], strategy=strategy)  # type: ignore[arg-type]
        inputs = torch.zeros(0, GDN.convolution.channels)
        with pytest.raises(LayoutError, match=r"conv_halo: initial.*\n.*\(6, 3, 42\)"):
            plan.conv_halo(GDN, inputs, initial=torch.zeros(5, 3, 42))
        with pytest.raises(LayoutError, match=r"entry_states: initial.*\n.*\(6, 6, 3, 5\)"):
            plan.entry_states(GDN, None, initial=torch.zeros(6, 2, 3, 5))
        for given in (None, torch.zeros(6, 6, 3, 4)):
            with pytest.raises(LayoutError, match=r"Plan\.final_states.*\(1, 9, 3, 5\)|initial"):
                plan.final_states(GDN, torch.zeros(1, 9, 3, 5), initial=given)
        with pytest.raises(LayoutError, match=r"Plan\.final_halo.*\(1, 3, 9\)"):
            plan.final_halo(GDN, torch.zeros(1, 3, 9))
        with pytest.raises(ConfigError, match="without a state"):
            plan.final_states(attention, torch.zeros(6, 6, 3, 5))
        with pytest.raises(ConfigError, match="without a convolution"):
            plan.final_halo(attention, torch.zeros(6, 3, 42))
        with pytest.raises(ConfigError, match="without a state"):
            plan.entry_states(attention, None, initial=torch.zeros(6, 6, 3, 5))
        assert plan.entry_states(attention, None) is None

    run_virtual(on_rank, size)


# -- deliberate breaks: each must be noticed -------------------------------------------------


@pytest.mark.parametrize("name", ["conv_halo", "entry_states", "final_states", "final_halo"])
@pytest.mark.parametrize("what", ["value", "gradient"])
def test_what_is_lost_between_packs_is_noticed(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value from the pack before, or, of a right value, the gradient."""
    before, right = carried(GDN, len(AWKWARD[0]), 5), getattr(Plan, name)
    expected = on_one(GDN, AWKWARD, 3, before)

    def broken(*given: Any, initial: Tensor | None = None) -> Tensor:
        found: Tensor = right(*given, initial=initial if what == "gradient" else None)
        # Still a collective in backward, but of nothing.
        return found.detach() + 0 * found if what == "gradient" else found

    monkeypatch.setattr(Plan, name, broken)
    found = on_ranks(GDN, AWKWARD, 3, before, ("state", "state"), "contiguous")
    assert relative_error(found, expected) > BROKEN
