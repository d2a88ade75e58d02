"""Plans on gloo ranks: layers against one process, and packs that differ between ranks."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_support import planned_mixers
from gdn_cp_support.planned_mixers import SequenceStates, continued, run_layers, weights_of, world
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import DivergenceError, LayoutError, PeerError
from pcomm.core.groups.group import Group
from pcomm.core.testing.on_ranks import ranks
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, Spec, make_plan

DIM = 6
PACK = (0, 48, 48, 96, 192, 240)
SPECS: list[Spec] = [GdnSpec(2, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4)]
# Roundings of values near one, over some hundred additions in another order: 1e-14 in fp64, and
# 1e-5 in fp32; a state or a gradient that is lost changes the first digit.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4}


def cp() -> Group:
    return Group.from_process_group("cp", world())


def check_strategies(strategy: str, layout: str, dtype: torch.dtype) -> None:
    """Three layers in a row, of as many kinds."""
    plan = make_plan(
        PACK,
        cp(),
        SPECS,
        layout=layout,  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        hidden_dim=DIM,
        verify=True,
    )
    check_layers(plan, SPECS, dtype)


def check_layers(plan: Plan, specs: list[Spec], dtype: torch.dtype) -> None:
    """Layers in a row, forward and every gradient, as on one process."""
    alone = make_plan(plan.tokens.cu_seqlens, (0, 1), specs)
    tokens, grads = run_layers(plan, specs, DIM, dtype=dtype)
    whole_tokens, whole_grads = run_layers(alone, specs, DIM, dtype=dtype)
    actual = [*tokens, *(cp().collectives.all_reduce(grad) for grad in grads)]
    expected = [*(plan.shard(whole) for whole in whole_tokens), *whole_grads]
    assert relative_error(actual, expected) < BOUNDS[dtype]


@ranks(2)
def test_two_ranks_are_one(rank: int) -> None:
    """Every strategy with either layout is for virtual ranks; here each meets gloo."""
    check_strategies("heads", "zigzag", torch.float32)
    check_strategies("docs", "zigzag", torch.float64)
    check_strategies("state", "contiguous", torch.float32)
    check_strategies("gather", "contiguous", torch.float64)
    check_strategies("auto", "zigzag", torch.float64)


@ranks(3)
def test_three_ranks_are_one(rank: int) -> None:
    check_strategies("docs", "contiguous", torch.float64)
    check_strategies("state", "zigzag", torch.float64)


@ranks(4)
def test_four_ranks_are_one(rank: int) -> None:
    check_strategies("heads", "contiguous", torch.float64)
    check_strategies("state", "zigzag", torch.float64)


@ranks(3)
def test_documents_longer_than_a_share_are_cut(rank: int) -> None:
    specs = SPECS[:2]
    for pack, layout in (((0, 24, 48, 240, 264), "contiguous"), ((0, 48), "zigzag")):
        plan = make_plan(
            pack,
            cp(),
            specs,
            layout=layout,  # type: ignore[arg-type]
            strategy="docs",
            hidden_dim=DIM,
            verify=True,
        )
        assert plan.num_cut_documents(specs[0]) == 1
        check_layers(plan, specs, torch.float64)


@pytest.mark.parametrize("strategy", ["docs", "state"])
@ranks(3)
def test_states_go_on_from_pack_to_pack(rank: int, strategy: str) -> None:
    """Two packs on three ranks and on one; of weights and first states virtual ranks show it."""
    spec, packs = GdnSpec(2, 4, 3, 5), ((0, 5, 5, 8, 18), (0, 1, 8, 8, 12))
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, upstream = ([random(pack[-1], DIM) for pack in packs] for _ in range(2))
    before = SequenceStates(random(4, *spec.state.shape), random(4, 3, spec.convolution.channels))
    results = []
    for place in (cp(), (0, 1)):
        plans = [
            make_plan(pack, place, spec, layout="contiguous", strategy=strategy)  # type: ignore[arg-type]
            for pack in packs
        ]
        x = [p.shard(h).clone().requires_grad_() for p, h in zip(plans, hidden, strict=True)]
        now, outputs = before, []
        for plan, part in zip(plans, x, strict=True):
            y, now = continued(plan, spec, part, weights_of(spec, DIM), now)
            outputs.append(y)
        # What arrives at the states adds up over ranks.
        arriving = [torch.ones_like(part) * 3 / plans[0].tokens.size for part in now]
        arriving[:0] = [p.shard(u) for p, u in zip(plans, upstream, strict=True)]
        grads = torch.autograd.grad([*outputs, *now], x, arriving)
        results.append((plans, [*outputs, *grads], [*now]))
    (plans, ours, states), (_, whole, whole_states) = results
    expected = [p.shard(y) for p, y in zip(plans * 2, whole, strict=True)]
    assert relative_error([*ours, *states], [*expected, *whole_states]) < BOUNDS[torch.float64]


@ranks(2)
def test_heads_are_one_exchange_each_way_whatever_the_number_of_sequences(rank: int) -> None:
    spec = SPECS[0]
    group = cp()
    for num_sequences in (1, 60):
        spy = SpyCollectives(group.collectives)
        plan = make_plan(tuple(range(0, 8 * num_sequences + 1, 8)), spy, spec, strategy="heads")
        sections = [torch.randn(4 * num_sequences, s.width).requires_grad_() for s in spec.sections]
        output = plan.from_heads(spec, plan.to_heads(spec, sections)[2] * 2)
        assert spy.counts == {"all_to_all": 2}
        output.sum().backward()
        assert spy.counts == {"all_to_all": 4}
        assert spy.sent_bytes == 2 * plan.traffic(spec).sent_bytes


@ranks(3)
def test_packs_that_differ_between_ranks_are_refused_on_all_of_them(rank: int) -> None:
    pack = (0, 12, 24) if rank != 2 else (0, 24, 24)
    group = cp()
    with pytest.raises(DivergenceError, match=r"'cu_seqlens\[1\] = 12', rank 2 has .* = 24'"):
        make_plan(pack, group, SPECS[0], strategy="state", verify=True)
    # Nobody is left waiting: the next plan is made as if nothing had happened.
    assert make_plan((0, 12, 24), group, SPECS[0], strategy="state", verify=True).strategies == (
        "state",
    )


@ranks(3)
def test_an_error_on_one_rank_is_one_on_all(rank: int) -> None:
    pack = (0, 12, 24) if rank != 1 else (0, 13, 24)
    kind, words = (LayoutError, "13 tokens") if rank == 1 else (PeerError, "rank 1: LayoutError")
    with pytest.raises(kind, match=words):
        make_plan(pack, cp(), SPECS[0], strategy="state", verify=True)


@pytest.mark.parametrize(
    "strategies",
    # `docs` exchanges as `heads` does, and `gather` gathers as `state` does.
    [("heads", "state"), pytest.param(("docs", "gather"), marks=pytest.mark.soak)],
    ids="+".join,
)
@ranks(2)
def test_messages_of_megabytes(rank: int, strategies: tuple[str, ...]) -> None:
    """4,096 tokens and a quarter of Qwen3-Next's heads, with single tokens and empty documents.

    Transports send large messages in segments and several at once, which small tensors never show.
    """
    spec = GdnSpec(4, 8, 32, 32)
    any_lengths = (1, 1, 1, 0, 517, 37, 2501, 1, 1037)
    # A zigzag layout wants lengths that 4 divides.
    by_four = (4, 4, 4, 0, 516, 36, 2500, 4, 1028)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_mixers, "CHUNK", 64)
        for strategy, layout, lengths in (
            ("heads", "zigzag", by_four),
            ("docs", "contiguous", any_lengths),
            ("state", "contiguous", any_lengths),
            ("gather", "zigzag", by_four),
        ):
            if strategy not in strategies:
                continue
            pack = tuple(accumulate(lengths, initial=0))
            assert pack[-1] == 4096
            plan = make_plan(pack, cp(), spec, layout=layout, strategy=strategy, element_bytes=4)  # type: ignore[arg-type]
            if strategy in ("heads", "gather"):
                assert plan.traffic(spec).forward_bytes > 1 << 21
            check_layers(plan, [spec], torch.float32)
