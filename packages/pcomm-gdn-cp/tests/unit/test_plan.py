"""Plans as objects: what they say, what they refuse, which strategy they choose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch

from gdn_cp_bench.slow_decay import offsets
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, make_plan
from pcomm.gdn_cp.strategies.choice import Link

# The shape of Qwen3-Next, as far as a plan goes.
GDN, ATTENTION = GdnSpec(16, 32, 128, 128), AttentionSpec(16, 2, 256)
SMALL = GdnSpec(2, 4, 3, 5)
FAST_LINK = Link(latency_us=20, gb_per_s=400)


def test_equal_plans_are_equal_and_found_again_in_a_dict() -> None:
    one = make_plan((0, 16, 48), (1, 2), [SMALL], strategy="heads")
    again = make_plan([0, 16, 48], (1, 2), SMALL, strategy="heads", link=FAST_LINK)
    tensor = make_plan(torch.tensor([0, 16, 48]), (1, 2), SMALL, strategy="heads")
    assert one == again == tensor
    assert hash(one) == hash(again) == hash(tensor)
    others = [
        make_plan((0, 32, 48), (1, 2), SMALL, strategy="heads"),
        make_plan((0, 16, 48), (0, 2), SMALL, strategy="heads"),
        make_plan((0, 16, 48), (1, 2), SMALL, strategy="gather"),
        make_plan((0, 16, 48), (1, 2), SMALL, strategy="heads", layout="contiguous"),
        make_plan((0, 16, 48), (1, 2), GDN, strategy="heads"),
    ]
    assert len({one, again, *others}) == 6
    with pytest.raises(AttributeError):
        one.rank = 1  # type: ignore[misc]


def test_alone_every_tensor_is_itself() -> None:
    for strategy in ("auto", "heads", "docs", "state", "gather"):
        plan = make_plan((0, 3, 8), IdentityCollectives(), SMALL, strategy=strategy)  # type: ignore[arg-type]
        hidden = torch.zeros(8, 6, requires_grad=True)
        sections = [torch.zeros(8, s.width, requires_grad=True) for s in SMALL.sections]
        assert plan.enter(SMALL, hidden) is hidden
        assert all(a is b for a, b in zip(plan.to_heads(SMALL, sections), sections, strict=True))
        assert plan.from_heads(SMALL, sections[2]) is sections[2]
        assert plan.leave(SMALL, hidden) is hidden
        assert plan.shard(hidden) is hidden
        assert plan.cu_seqlens_of(SMALL) == (0, 3, 8)
        assert not plan.needs_summary(SMALL)
        assert plan.conv_halo(SMALL, hidden) is None
        assert plan.traffic(SMALL).num_collectives == 0
    assert "nothing is sent" in plan.describe()


def test_positions_between_layers_and_in_the_core() -> None:
    spec = AttentionSpec(2, 2, 4)
    plan = make_plan((0, 8, 12), (0, 2), [SMALL, spec], strategy="state")
    assert plan.positions().tolist() == [0, 1, 6, 7, 0, 3]
    assert plan.local_cu_seqlens == (0, 4, 6)
    assert plan.positions_of(SMALL).tolist() == [0, 1, 6, 7, 0, 3]
    assert plan.cu_seqlens_of(SMALL) == (0, 2, 4, 5, 6)
    # Attention has no state; its heads see all tokens.
    assert plan.strategy_of(spec) == "heads"
    assert plan.positions_of(spec).tolist() == [*range(8), *range(4)]
    assert plan.shard(torch.arange(12)).tolist() == [0, 1, 6, 7, 8, 11]


# -- the strategy that costs least ---------------------------------------------------------------


def test_many_short_documents_are_dealt_out() -> None:
    plan = make_plan(offsets([128] * 64), (0, 4), [GDN, ATTENTION], hidden_dim=2048)
    assert plan.strategies == ("docs", "docs")
    text = plan.describe()
    assert "64 sequences, 8192 tokens, zigzag" in text
    assert "imbalance 0.0%" in text
    assert "not heads: " in text
    # 2048 tokens a rank, of which 3/4 move, there and back, 2048 columns of 2 bytes.
    assert f"{2 * 2048 * 3 // 4 * 2048 * 2:,} bytes sent" in text
    # Without the width of hidden states they cannot be weighed.
    unknown = make_plan(offsets([128] * 64), (0, 4), GDN)
    assert unknown.strategies != ("docs",)
    assert "docs: hidden_dim was not given" in unknown.describe()


def test_one_long_document_is_cut() -> None:
    long = make_plan((0, 1 << 18), (0, 8), [GDN, ATTENTION], hidden_dim=2048)
    assert long.strategies == ("state", "heads")
    assert "docs: at best 262144 of 262144 tokens on one rank, 700% above" in long.describe()
    assert "state: a mixer without a state" in long.describe()
    short = make_plan((0, 1024), (0, 4), GDN, hidden_dim=2048, link=FAST_LINK)
    assert short.strategies == ("heads",)


def test_an_imbalance_is_named_and_can_be_asked_for_all_the_same() -> None:
    pack = offsets([24, 16, 24])
    auto = make_plan(pack, (0, 2), ATTENTION, hidden_dim=64)
    assert "docs: 25% above the average" in auto.describe()
    asked = make_plan(pack, (0, 2), [ATTENTION, GDN], strategy="docs")
    assert asked.imbalance(ATTENTION) == pytest.approx(0.25)
    assert "imbalance 25.0%, no document is cut" in asked.describe()
    # With a state the document in the middle is cut.
    assert asked.imbalance(GDN) == 0
    assert "imbalance 0.0%, 1 document is cut" in asked.describe()
    assert (asked.num_cut_documents(ATTENTION), asked.num_cut_documents(GDN)) == (0, 1)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_one_giant_among_many_small_documents(size: int) -> None:
    """It takes 2 of 4 shares. Mixers with a state cut it, attention goes to heads."""
    spec = AttentionSpec(24, 24, 64)
    pack = offsets([*[96] * 64, 64 * 192, *[96] * 64])
    plan = make_plan(pack, (0, size), [GDN, spec], hidden_dim=2048)
    assert plan.strategies == ("docs", "heads")
    assert plan.num_cut_documents(GDN) == 1
    assert plan.imbalance(GDN) <= 0.1
    text = plan.describe()
    assert "1 document is cut" in text
    assert "above" in text[text.index("not docs") :]
    sent = plan.traffic(GDN)
    assert sent.forward == ("all_to_all", "all_gather", "all_gather", "all_to_all")
    # Heads that the ranks do not divide leave attention one way.
    if size == 3:
        spec = AttentionSpec(16, 2, 64)
        assert make_plan(pack, (0, 3), [GDN, spec], hidden_dim=2048).strategies[1] == "gather"


def test_gather_is_taken_only_where_nothing_else_works() -> None:
    spec = AttentionSpec(3, 3, 4)
    plan = make_plan((0, 64), (0, 2), spec, hidden_dim=8)
    assert plan.strategies == ("gather",)
    assert "nothing else works" in plan.describe()
    without_state = make_plan((0, 8), (0, 2), [SMALL, spec], strategy="state")
    assert without_state.strategies == ("state", "gather")
    assert "heads: 3 heads over 2 ranks" in plan.describe()


def test_the_model_counts_time_per_collective_and_per_byte() -> None:
    plan = make_plan((0, 64), (0, 2), SMALL, strategy="heads", element_bytes=4)
    sent = plan.traffic(SMALL).sent_bytes
    # 32 tokens to one peer: q and k of one head of 3, v of two of 5, b and a of two; and v back.
    assert sent == 2 * 32 * (3 + 3 + 10 + 2 + 2 + 10) * 4
    assert Link(10, 2).time_us(plan.traffic(SMALL)) == pytest.approx(4 * 10 + sent / 2e3)


# -- what is refused, before anything is sent ------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"cu_seqlens": (0, 12, 24), "group": (0, 4)}, LayoutError, "no multiple of 8"),
        ({"cu_seqlens": (0, 15), "layout": "contiguous"}, LayoutError, "a remainder of 1"),
        ({"cu_seqlens": (0, 16, 8)}, LayoutError, r"\[16, 8\] from place 1"),
        ({"cu_seqlens": (8, 16)}, LayoutError, r"\[8, 16\]"),
        ({"cu_seqlens": (0, 8.0)}, ConfigError, "float"),
        ({"cu_seqlens": torch.zeros(2, device="meta")}, ConfigError, "a tensor on meta"),
        ({"num_tokens": 20}, LayoutError, "a buffer of 20 tokens: cu_seqlens ends at 16"),
        ({"layout": "contigous"}, ConfigError, "Did you mean 'contiguous'"),
        ({"strategy": "head"}, ConfigError, "Did you mean 'heads'"),
        ({"specs": ()}, ConfigError, "no mixer"),
        ({"group": (2, 2)}, ConfigError, "rank 2 of 2"),
        ({"strategy": "heads", "group": (0, 8)}, LayoutError, r"4 heads over 8(.|\n)*'state'"),
        ({"strategy": "docs", "group": (0, 4), "specs": ATTENTION}, LayoutError, "300% above"),
        ({"verify": True}, UnsupportedError, "a group of type tuple"),
        ({"group": None}, ConfigError, r"type NoneType\n.*default group.*\n.*\(0, 1\)"),
        ({"group": [0, 2]}, ConfigError, "of type list"),
        ({"group": -100}, ConfigError, r"-100(.|\n)*ranks that do not belong"),
        ({"group": (0, 2, 4)}, ConfigError, "a tuple of int, int, int"),
        ({"group": ()}, ConfigError, "a tuple of nothing"),
        ({"group": (0, 2.0)}, ConfigError, "a tuple of int, float"),
        ({"group": (True, 2)}, ConfigError, "a tuple of bool, int"),
        ({"specs": "gdn"}, ConfigError, "'g', of type str"),
        ({"specs": {"num_heads": 4}}, ConfigError, "of type str"),
        ({"specs": [SMALL, None]}, ConfigError, "None, of type NoneType"),
        ({"specs": 4}, ConfigError, "4, of type int"),
        ({"specs": GdnSpec}, ConfigError, "of type type"),
        ({"hidden_dim": 0}, ConfigError, "hidden_dim=0: no integer >= 1"),
        ({"hidden_dim": -64}, ConfigError, "hidden_dim=-64"),
        ({"hidden_dim": 64.0}, ConfigError, r"hidden_dim=64\.0"),
        ({"hidden_dim": True}, ConfigError, "hidden_dim=True"),
        ({"element_bytes": 0}, ConfigError, "element_bytes=0: a size that no dtype has"),
        ({"element_bytes": 3}, ConfigError, "element_bytes=3"),
        ({"element_bytes": 2.0}, ConfigError, r"element_bytes=2\.0"),
        ({"element_bytes": torch.bfloat16}, ConfigError, r"torch\.bfloat16(.|\n)*itemsize"),
        ({"link": 50.0}, ConfigError, r"50\.0, of type float"),
        ({"strategy": None}, ConfigError, "strategy=None"),
        ({"strategy": ["heads"]}, ConfigError, r"strategy=\['heads'\]"),
        ({"layout": None}, ConfigError, "layout=None"),
        ({"cu_seqlens": None}, ConfigError, "NoneType"),
        ({"cu_seqlens": torch.zeros(2, 2)}, ConfigError, "integer"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments = {"cu_seqlens": (0, 16), "group": (0, 2), "specs": SMALL, **options}
    with pytest.raises(kind, match=words):
        make_plan(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["heads", "docs", "state", "gather"])
def test_hidden_states_of_another_width_than_was_said_are_refused(strategy: Any) -> None:
    """The strategies were chosen for that width, and `traffic` would count the wrong bytes."""

    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan((0, 16, 32), collectives, SMALL, strategy=strategy, hidden_dim=6)
        assert len(plan.enter(SMALL, torch.zeros(16, 6))) == plan._strategies[0].layer_rows
        assert len(plan.enter(SMALL, torch.zeros(16, 2, 3))) == plan._strategies[0].layer_rows
        with pytest.raises(LayoutError, match=r"Plan\.enter: hidden_dim=6.*shape \(16, 5\)"):
            plan.enter(SMALL, torch.zeros(16, 5))
        with pytest.raises(LayoutError, match=r"Plan\.leave: hidden_dim=6"):
            plan.leave(SMALL, torch.zeros(plan._strategies[0].layer_rows, 7))
        unknown = make_plan((0, 16, 32), collectives, SMALL, strategy=strategy)
        assert unknown.enter(SMALL, torch.zeros(16, 5)).shape[1] == 5

    run_virtual(on_rank, 2)


def test_the_model_weighs_the_rank_that_sends_most_not_the_first() -> None:
    """Rank 0 has its documents already, and the others wait for the one that sends most."""
    # Contiguous shares of 32 tokens, and documents that begin up to 5 tokens behind them.
    pack, spec = (0, 32, 67, 101, 128), AttentionSpec(4, 2, 4)
    plan = make_plan(pack, (0, 4), spec, strategy="docs", layout="contiguous", hidden_dim=8)
    sent = [plan._strategies[0].traffic(rank, 2, 8).sent_bytes for rank in range(4)]
    assert sent[0] < max(sent) / 2
    # On a link of this speed `docs` costs less than `heads` by what rank 0 sends, and more by
    # what the busiest sends.
    heads = make_plan(pack, (0, 4), spec, strategy="heads", layout="contiguous").traffic(spec)
    assert len(heads.forward) == len(plan.traffic(spec).forward)
    wide = next(d for d in range(8, 4096, 8) if _most(plan, d) > heads.sent_bytes)
    assert plan._strategies[0].traffic(0, 2, wide).sent_bytes < heads.sent_bytes
    auto = [
        make_plan(pack, (rank, 4), spec, layout="contiguous", hidden_dim=wide) for rank in range(4)
    ]
    assert {chosen.strategies for chosen in auto} == {("heads",)}
    # On the other side of the threshold; at equal bytes the strategy named first is taken.
    narrow = make_plan(pack, (0, 4), spec, layout="contiguous", hidden_dim=wide - 16)
    assert narrow.strategies == ("docs",)
    # The estimate is that of the busiest rank, whoever prints it.
    (docs,) = [c for c in auto[0].choices[0].rejected if c.strategy == "docs"]
    assert docs.traffic.sent_bytes == _most(plan, wide)


def _most(plan: Plan, hidden_dim: int) -> int:
    return max(plan._strategies[0].traffic(rank, 2, hidden_dim).sent_bytes for rank in range(4))


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        for strategy in ("heads", "docs", "state", "gather"):
            plan = make_plan((0, 16, 32), collectives, SMALL, strategy=strategy)  # type: ignore[arg-type]
            right = [torch.zeros(16, s.width) for s in SMALL.sections]
            with pytest.raises(LayoutError, match=r"Plan\.enter.*\n.*for 32 over 2 ranks"):
                plan.enter(SMALL, torch.zeros(17, 6))
            with pytest.raises(LayoutError, match=r"Plan\.leave"):
                plan.leave(SMALL, torch.zeros(32, 6))
            with pytest.raises(LayoutError, match=r"q, k, v, b, a of GdnSpec"):
                plan.to_heads(SMALL, right[:4])
            for fused in (0, 6):
                with pytest.raises(ConfigError, match=f"fused={fused}: 5 sections"):
                    plan.to_heads(SMALL, right, fused=fused)
            with pytest.raises(LayoutError, match=r"float32', 'torch.float64"):
                plan.to_heads(SMALL, [*right[:4], right[4].double()])
            with pytest.raises(LayoutError, match=r"Plan\.from_heads.*shape \(3, 20\)"):
                plan.from_heads(SMALL, torch.zeros(3, 20))
            with pytest.raises(LayoutError, match=r"Plan\.shard"):
                plan.shard(torch.zeros(16))
        plan = make_plan((0, 16, 32), collectives, SMALL, strategy="state")
        with pytest.raises(LayoutError, match=r"Plan\.conv_halo"):
            plan.conv_halo(SMALL, torch.zeros(3, SMALL.convolution.channels))
        with pytest.raises(LayoutError, match=r"Plan\.entry_states.*shape \(2, 4, 3, 3\)"):
            plan.entry_states(SMALL, (torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 5)))
        with pytest.raises(ConfigError, match=r"Plan\.entry_states.*no summary\n6 segments"):
            plan.entry_states(SMALL, None)

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("kind", [GdnSpec, Mamba2Spec, AttentionSpec])
@pytest.mark.parametrize("value", [0, 2.0, True, "2", None])
def test_specifications_have_whole_positive_sizes(kind: Any, value: Any) -> None:
    for field in fields(kind):
        counts = {other.name: 2 for other in fields(kind)} | {field.name: value}
        with pytest.raises(ConfigError, match="in whole numbers"):
            kind(**counts)


PLAN = make_plan((0, 16), (0, 2), SMALL, strategy="heads")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PLAN.strategy_of(Mamba2Spec(4, 3, 2, 5)), "Mamba2Spec"),
        (
            lambda: PLAN.to_heads(SMALL, [torch.zeros(8, s.width) for s in SMALL.sections]),
            "a pair of numbers",
        ),
        (lambda: Link(gb_per_s=0), "gb_per_s=0"),
        (lambda: Link(latency_us=None), "latency_us=None"),  # type: ignore[arg-type]
    ],
)
def test_what_a_plan_cannot_do_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_group_alone_needs_no_store_to_verify() -> None:
    group = Group("cp", (0,), None)
    assert make_plan((0, 16), group, SMALL, verify=True) == make_plan((0, 16), (0, 1), SMALL)
    with pytest.raises(LayoutError):
        make_plan((0, 16, 8), group, SMALL, verify=True)


# -- size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_thousand_sequences_and_a_few_empty_ones(layout: str) -> None:
    pack = offsets([16 * (n % 3) for n in range(1000)])
    specs = [GDN, ATTENTION]
    for strategy in ("heads", "docs", "state", "auto"):
        plans: list[Plan] = [
            make_plan(pack, (rank, 8), specs, strategy=strategy, layout=layout, hidden_dim=64)  # type: ignore[arg-type]
            for rank in range(8)
        ]
        for spec in specs:
            if plans[0].strategy_of(spec) in ("docs", "state"):
                seen = torch.cat([plan.positions_of(spec) for plan in plans])
                every = torch.cat([torch.arange(b - a) for a, b in pairwise(pack)])
                assert torch.equal(seen.sort().values, every.sort().values)
            else:
                assert plans[0].cu_seqlens_of(spec) == pack


def test_planning_does_not_loop_over_tokens() -> None:
    """The goal is 10 ms, which a loaded machine may miss; lines of Python are the same on any."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    pack, before = offsets([64] * 1000), sys.gettrace()
    sys.settrace(count)
    try:
        make_plan(pack, (1, 4), [GDN, ATTENTION], strategy="heads").prepare("cpu")
    finally:
        sys.settrace(before)
    # It takes 9,000; a loop over the 64,000 tokens, or some over the documents, would take more.
    assert 0 < num_lines < 10_000
