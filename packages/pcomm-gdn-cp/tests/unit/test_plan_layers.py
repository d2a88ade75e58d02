"""Whole layers on virtual ranks against one rank, with every strategy; and what breaks them.

Comparisons are in fp64, where both sides are off by at most some hundred roundings of values near
one. What is broken on purpose must be off by far more, or the comparison says nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_support.planned_mixers import (
    LayerResults,
    in_pack_order,
    run_layers,
    sum_over_ranks,
)
from pcomm.core.exchange import Permutation
from pcomm.core.exchange.positions import RowOrder
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, Spec, make_plan
from pcomm.gdn_cp.sequence_segments import SequenceSegments
from pcomm.gdn_cp.strategies.choice import Link
from pcomm.gdn_cp.strategies.state import StatePassing

GDN, MAMBA, ATTENTION = GdnSpec(2, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4)
# Key heads that several ranks need, and a mixer with as many groups as heads.
NARROW_GDN, WIDE_MAMBA = GdnSpec(1, 4, 3, 2), Mamba2Spec(4, 2, 4, 3)
DIM = 6
# Zigzag chunks of 3 to 24 tokens at 2 to 8 ranks, so shorter and longer than a convolution.
PACK = (0, 48, 48, 96, 192, 240)
BOUND = 1e-12
BROKEN = 1e-3


def on_one(specs: list[Spec], cu_seqlens: tuple[int, ...]) -> LayerResults:
    """Output and gradients of the layers one after another, on one rank."""
    return run_layers(make_plan(cu_seqlens, (0, 1), specs), specs, DIM)


def on_ranks(
    specs: list[Spec], cu_seqlens: tuple[int, ...], size: int, **options: Any
) -> LayerResults:
    """The same by `size` ranks: tokens in the order of the pack, parameters summed over ranks."""

    def on_rank(collectives: VirtualCollectives) -> tuple[Plan, LayerResults]:
        plan = make_plan(cu_seqlens, collectives, specs, hidden_dim=DIM, **options)
        return plan, run_layers(plan, specs, DIM)

    results = run_virtual(on_rank, size)
    layout = results[0][0].tokens
    tokens = [in_pack_order(layout, [found[0][i] for _, found in results]) for i in range(2)]
    return tokens, sum_over_ranks([found[1] for _, found in results])


def error(actual: LayerResults, expected: LayerResults) -> float:
    return max(relative_error(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("spec", "size", "strategy", "layout"),
    [
        # Every mixer with every strategy and every strategy with either layout.
        (GDN, 4, "heads", "zigzag"),
        (GDN, 2, "docs", "contiguous"),
        (GDN, 4, "state", "zigzag"),
        (GDN, 2, "gather", "contiguous"),
        (MAMBA, 2, "heads", "contiguous"),
        (MAMBA, 4, "docs", "zigzag"),
        (MAMBA, 2, "state", "contiguous"),
        (MAMBA, 4, "gather", "zigzag"),
        (ATTENTION, 2, "heads", "zigzag"),
        (ATTENTION, 4, "docs", "contiguous"),
        (ATTENTION, 4, "gather", "zigzag"),
        (GDN, 3, "state", "contiguous"),
        (MAMBA, 3, "docs", "zigzag"),
        # More ranks than heads.
        (GDN, 8, "state", "contiguous"),
        (MAMBA, 8, "state", "zigzag"),
        (NARROW_GDN, 4, "heads", "contiguous"),
        (NARROW_GDN, 2, "state", "zigzag"),
        (WIDE_MAMBA, 4, "heads", "zigzag"),
    ],
    ids=str,
)
def test_a_layer_on_many_ranks_is_the_layer_on_one(
    spec: Spec, size: int, strategy: str, layout: str
) -> None:
    expected = on_one([spec], PACK)
    assert error(on_ranks([spec], PACK, size, strategy=strategy, layout=layout), expected) < BOUND


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("heads", "contiguous"),
        ("docs", "zigzag"),
        ("state", "contiguous"),
        ("gather", "zigzag"),
        ("auto", "zigzag"),
    ],
)
def test_a_hybrid_of_three_mixers_shares_one_plan(strategy: str, layout: str) -> None:
    specs = [GDN, MAMBA, ATTENTION, GDN]
    expected = on_one(specs, PACK)
    assert error(on_ranks(specs, PACK, 2, strategy=strategy, layout=layout), expected) < BOUND


GIANT = (0, 24, 48, 240, 264, 312)


@pytest.mark.parametrize(
    ("strategy", "cu_seqlens", "size", "layout"),
    [
        # One sequence over all ranks; segments shorter than the convolution; boundaries everywhere.
        ("state", (0, 24), 4, "contiguous"),
        ("state", (0, 8), 4, "zigzag"),
        ("state", (0, 4), 4, "contiguous"),
        ("state", (0, 1, 2, 3, 8, 9, 10, 12), 3, "contiguous"),
        ("state", (0, 1, 11, 12), 4, "contiguous"),
        ("state", (0, 5, 5, 10, 10), 5, "contiguous"),
        ("state", (0, 6, 6, 24, 30), 3, "zigzag"),
        # Documents longer than a share: one giant among small ones, on 2 to 4 ranks.
        ("docs", GIANT, 2, "zigzag"),
        ("docs", GIANT, 3, "contiguous"),
        ("docs", GIANT, 4, "zigzag"),
        ("docs", (0, 16, 32, 128, 128, 144, 176, 192), 8, "contiguous"),
        # One document; more ranks than documents; cut in segments shorter than the convolution.
        ("docs", (0, 48), 3, "zigzag"),
        ("docs", (0, 16), 8, "contiguous"),
        # Two straddlers, each on three ranks or more.
        ("docs", (0, 96, 192), 8, "zigzag"),
    ],
    ids=str,
)
def test_states_and_halos_cross_awkward_borders(
    strategy: str, cu_seqlens: tuple[int, ...], size: int, layout: str
) -> None:
    specs = [GDN, MAMBA]
    if strategy == "docs":
        assert make_plan(cu_seqlens, (0, size), specs, strategy="docs").num_cut_documents(GDN)
    actual = on_ranks(specs, cu_seqlens, size, strategy=strategy, layout=layout)
    assert error(actual, on_one(specs, cu_seqlens)) < BOUND


def test_a_hybrid_cuts_documents_for_one_mixer_and_splits_heads_for_another() -> None:
    specs, cu_seqlens = [GDN, ATTENTION, MAMBA], GIANT
    # A link on which collectives cost nothing, so that hidden states win by their bytes.
    link = Link(latency_us=1e-9, gb_per_s=1e-3)
    plan = make_plan(cu_seqlens, (0, 4), specs, hidden_dim=DIM, link=link)
    assert plan.strategies == ("docs", "heads", "docs")
    assert error(on_ranks(specs, cu_seqlens, 4, link=link), on_one(specs, cu_seqlens)) < BOUND


@pytest.mark.parametrize("longest", [12, 24])
def test_a_rank_without_a_token_takes_part_when_others_share_a_document(longest: int) -> None:
    """Twelve ranks for eleven times twelve tokens: it takes so many for one to be left out."""
    lengths = [12] * 5 + [longest] + [12] * ((132 - 60 - longest) // 12)
    cu_seqlens = tuple(accumulate(lengths, initial=0))
    options = {"strategy": "docs", "layout": "contiguous"}
    plans = [make_plan(cu_seqlens, (rank, 12), GDN, **options) for rank in range(12)]  # type: ignore[arg-type]
    assert sorted(plan.cu_seqlens_of(GDN)[-1] for plan in plans) == [0] + [12] * 11
    assert plans[0].num_cut_documents(GDN) == (longest > 12)
    actual = on_ranks([GDN, MAMBA], cu_seqlens, 12, **options)
    assert error(actual, on_one([GDN, MAMBA], cu_seqlens)) < BOUND
    # Nor a document for attention, whose documents are never cut.
    actual = on_ranks([ATTENTION], (0, 24, 48), 3, strategy="docs")
    assert error(actual, on_one([ATTENTION], (0, 24, 48))) < BOUND


# -- deliberate breaks: each must be noticed -------------------------------------------------


def stop_state_gradients(self: StatePassing, *given: Any) -> Tensor:
    states = ENTRY_STATES(self, *given)
    assert states is not None
    # Still a collective in backward, but of nothing.
    return states.detach() + 0 * states


def leak_states(self: SequenceSegments, rank: int) -> tuple[Tensor, Tensor]:
    """A sequence starts in what the sequence before has left."""
    first, last = SPANS_OF(self, rank)
    return (first - 1).clamp(min=0), last


def swap_the_permutations(self: RowOrder, device: torch.device) -> Permutation | None:
    found = ORDER_ON(self, device)
    return found and found.inverse


ENTRY_STATES, CONV_HALO = StatePassing.entry_states, StatePassing.conv_halo
SPANS_OF, ORDER_ON = SequenceSegments._spans_of, RowOrder.on


@pytest.mark.parametrize(
    ("spec", "strategy", "place", "mistake"),
    [
        (GDN, "state", (StatePassing, "entry_states"), stop_state_gradients),
        (GDN, "docs", (StatePassing, "conv_halo"), lambda *given: 0 * CONV_HALO(*given)),
        # Its maps are numbers where those of the other are matrices.
        (MAMBA, "state", (SequenceSegments, "_spans_of"), leak_states),
        (ATTENTION, "heads", (RowOrder, "on"), swap_the_permutations),
    ],
    ids=["gradient of states", "halos", "states of others", "order"],
)
def test_a_mistake_is_noticed(
    spec: Spec, strategy: str, place: Any, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_one([spec], PACK)
    monkeypatch.setattr(*place, mistake)
    assert error(on_ranks([spec], PACK, 4, strategy=strategy), expected) > BROKEN
