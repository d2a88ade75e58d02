"""What arrives where, bit by bit, on virtual ranks; how often something is sent, and how much."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Spec, make_plan

SPECS = [GdnSpec(2, 8, 2, 3), Mamba2Spec(8, 2, 4, 3), AttentionSpec(8, 1, 2)]
# Heads that 1, 2, 3, 4 and 8 ranks divide, with key heads that they do not.
DIVIDED = [GdnSpec(2, 24, 2, 3), Mamba2Spec(24, 2, 6, 3), AttentionSpec(24, 1, 2)]
PACK = (0, 16, 16, 64, 80, 96, 128)


@st.composite
def packs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, str]:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    cu_seqlens = tuple(accumulate((c * 2 * size for c in chunks), initial=0))
    return cu_seqlens, size, draw(st.sampled_from(["zigzag", "contiguous"]))


def numbered(num_tokens: int, width: int) -> Tensor:
    """Whole numbers that differ per element and add exactly."""
    return (torch.arange(num_tokens * width) * 7 % 1009).double().view(num_tokens, width)


def columns(section: Any, heads: tuple[int, ...]) -> list[int]:
    width = section.head_width
    return [head * width + i for head in heads for i in range(width)]


@pytest.mark.parametrize("spec", DIVIDED, ids=lambda spec: type(spec).__name__)
@given(pack=packs())
@settings(max_examples=12, deadline=None)
def test_heads_there_and_back_and_the_gradients(
    spec: Spec, pack: tuple[tuple[int, ...], int, str]
) -> None:
    cu_seqlens, size, layout = pack
    num_tokens = cu_seqlens[-1]
    whole = [numbered(num_tokens, section.width) for section in spec.sections]
    weight = [numbered(num_tokens, section.width) + 5 for section in spec.sections]

    def on_rank(collectives: VirtualCollectives) -> list[Tensor]:
        plan = make_plan(cu_seqlens, collectives, spec, layout=layout, strategy="heads")  # type: ignore[arg-type]
        share = plan.head_share(spec)
        mine = [plan.shard(x).clone().requires_grad_() for x in whole]
        there = plan.to_heads(spec, mine)
        assert plan.cu_seqlens_of(spec) == cu_seqlens
        upstream = []
        for x, section, got, w in zip(whole, spec.sections, there, weight, strict=True):
            index = torch.tensor(columns(section, share.heads(section.name)), dtype=torch.int64)
            assert_equal(got.detach(), x[:, index])
            upstream.append(w[:, index])
        grads = torch.autograd.grad(there, mine, upstream)

        output = numbered(num_tokens, spec.output.width)
        index = torch.tensor(columns(spec.output, share.heads("output")), dtype=torch.int64)
        computed = output[:, index].clone().requires_grad_()
        back = plan.from_heads(spec, computed)
        assert_equal(back.detach(), plan.shard(output))
        (grad,) = torch.autograd.grad(back, computed, plan.shard(output * 3))
        assert_equal(grad, output[:, index] * 3)
        return [plan.shard(x) for x in weight], grads, share

    for expected, grads, share in run_virtual(on_rank, size):
        for one, grad, part in zip(expected, grads, share.sections, strict=True):
            # Every copy of a key head has had the same gradient here.
            assert_equal(grad, one * part.copies)


def works(spec: Spec, size: int, strategy: str) -> bool:
    """3 ranks do not divide 8 heads; without a state, 8 are too many for the longest document."""
    return (strategy, size) != ("heads", 3) and (
        spec.state or (strategy != "state" and (strategy, size) != ("docs", 8))
    )


@pytest.mark.parametrize(
    ("spec", "size", "strategy"),
    [
        (spec, size, strategy)
        for spec, sizes in zip(SPECS, [(2, 3, 8), (3, 4), (2, 4)], strict=True)
        for size in sizes
        for strategy in ("heads", "docs", "state", "gather")
        if works(spec, size, strategy)
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Spec) else str(value),
)
def test_a_layer_sends_what_the_plan_says(spec: Spec, size: int, strategy: str) -> None:
    layout = "zigzag" if (size + len(strategy)) % 2 else "contiguous"
    cu_seqlens = tuple(x * 3 for x in PACK)
    hidden_dim = 5

    def on_rank(collectives: VirtualCollectives) -> tuple[int, int]:
        spy = SpyCollectives(collectives)
        plan = make_plan(
            cu_seqlens,
            spy,
            spec,
            layout=layout,  # type: ignore[arg-type]
            strategy=strategy,  # type: ignore[arg-type]
            hidden_dim=hidden_dim,
            element_bytes=4,
        )
        hidden = plan.shard(torch.randn(cu_seqlens[-1], hidden_dim)).requires_grad_()
        x = plan.enter(spec, hidden)
        sections = [x.sum(1, keepdim=True) * torch.ones(s.width) for s in spec.sections]
        parts = plan.to_heads(spec, sections)
        y = parts[0].sum(1, keepdim=True) * torch.ones(plan.head_share(spec).output.width)
        if plan.needs_summary(spec):
            assert spec.state is not None
            assert spec.convolution is not None
            inputs = parts[0].sum(1, keepdim=True) * torch.ones(spec.convolution.channels)
            halo = plan.conv_halo(spec, inputs)
            assert halo is not None
            num_heads, key_dim, value_dim = spec.state.shape
            rows, columns = spec.state.transition.shape(key_dim)
            ones = inputs.mean() * torch.ones(len(plan.cu_seqlens_of(spec)) - 1, num_heads, 1, 1)
            states = plan.entry_states(
                spec,
                (ones * torch.ones(rows, columns), ones * torch.ones(key_dim, value_dim)),
            )
            assert states is not None
            y = y + halo.sum() + states.sum()
        back = plan.from_heads(spec, y).sum(1, keepdim=True) * torch.ones(hidden_dim)
        loss = plan.leave(spec, back).square().sum()
        traffic = plan.traffic(spec)
        assert plan.needs_summary(spec) == (
            "all_gather" in traffic.forward and strategy != "gather"
        )
        assert (plan.num_cut_documents(spec) > 0) == (
            strategy == "docs" and plan.needs_summary(spec)
        )
        assert tuple(call.operation for call in spy.calls) == traffic.forward
        assert spy.sent_bytes == traffic.forward_bytes
        spy.clear()
        loss.backward()
        assert sorted(call.operation for call in spy.calls) == sorted(traffic.backward)
        assert spy.sent_bytes == traffic.backward_bytes
        return traffic.forward_bytes, traffic.backward_bytes

    sent = run_virtual(on_rank, size)
    if strategy == "heads" and spec.sections[1].num_heads % size == 0:
        # What must be sent at least: every column of every token that is not here already.
        width = sum(section.width for section in (*spec.sections, spec.output))
        least = cu_seqlens[-1] // size * width * (size - 1) // size * 4
        assert sent == [(least, least)] * size


def test_documents_move_as_hidden_states_and_come_back() -> None:
    hidden = numbered(128, 3)
    spec = SPECS[0]

    def on_rank(collectives: VirtualCollectives) -> Tensor:
        plan = make_plan(PACK, collectives, spec, strategy="docs")
        assert not plan.num_cut_documents(spec)
        mine = plan.shard(hidden).clone().requires_grad_()
        documents = plan.enter(spec, mine)
        assert plan.cu_seqlens_of(spec)[-1] == len(documents)
        assert_equal(plan.leave(spec, documents).detach(), plan.shard(hidden))
        lengths = [b - a for a, b in pairwise(plan.cu_seqlens_of(spec))]
        expected = [place for length in lengths for place in range(length)]
        assert plan.positions_of(spec).tolist() == expected
        (grad,) = torch.autograd.grad(documents, mine, documents.detach() * 2)
        assert_equal(grad, plan.shard(hidden) * 2)
        return documents.detach()

    assert_equal(torch.cat(run_virtual(on_rank, 2)), hidden)


def test_documents_cost_what_moves_and_a_cut_one_what_it_hands_over() -> None:
    """Of 96 tokens on two ranks, with and without a straddler, moved and in place."""
    spec = SPECS[0]
    moved, in_place, cut = (
        make_plan(
            cu, (0, 2), spec, strategy="docs", hidden_dim=5, element_bytes=4, layout="contiguous"
        )
        for cu in ((0, 46, 96), (0, 48, 96), (0, 16, 96))
    )
    assert moved.traffic(spec).forward == moved.traffic(spec).backward == ("all_to_all",) * 2
    # Two tokens go to the other rank, and their outputs come back to this one.
    assert moved.traffic(spec).forward_bytes == 2 * 5 * 4
    assert not moved.needs_summary(spec)
    assert in_place.traffic(spec).num_collectives == in_place.traffic(spec).sent_bytes == 0
    traffic = cut.traffic(spec)
    assert traffic.forward == ("all_gather", "all_gather")
    assert traffic.backward == ("reduce_scatter", "reduce_scatter")
    # 3 rows of 2*2*2 + 8*3 channels, a map of 8 heads.
    assert traffic.forward_bytes == 3 * 32 * 4 + 8 * (2 * 2 + 2 * 3) * 4
    assert traffic.backward_bytes == 0
    other = make_plan(
        (0, 16, 96), (1, 2), spec, strategy="docs", element_bytes=4, layout="contiguous"
    )
    assert other.traffic(spec).forward_bytes == 0
    assert other.traffic(spec).backward_bytes == traffic.forward_bytes
    zigzag = make_plan((0, 16, 96), (0, 2), spec, strategy="docs", hidden_dim=5)
    assert zigzag.traffic(spec).forward == ("all_to_all", "all_gather", "all_gather", "all_to_all")


def test_documents_in_place_are_not_sent() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan((0, 48, 96), collectives, SPECS[2], strategy="docs", layout="contiguous")
        hidden = plan.shard(numbered(96, 5))
        assert plan.enter(SPECS[2], hidden) is plan.leave(SPECS[2], hidden) is hidden

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("strategy", ["heads", "gather"])
def test_fused_sections_are_one_tensor_and_nothing_else_changes(strategy: str) -> None:
    spec = SPECS[0]
    whole = [numbered(128, s.width) for s in spec.sections]

    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan(PACK, collectives, spec, strategy=strategy)  # type: ignore[arg-type]
        mine = [plan.shard(x) for x in whole]
        apart = plan.to_heads(spec, mine)
        together = plan.to_heads(spec, mine, fused=3)
        assert len(together) == 3
        assert_equal(together[0].contiguous(), torch.cat(apart[:3], 1))
        assert {x.untyped_storage().data_ptr() for x in apart} == {
            apart[0].untyped_storage().data_ptr()
        }

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("strategy", ["heads", "docs", "gather"])
def test_a_gradient_that_is_not_contiguous_and_one_that_is_missing(strategy: str) -> None:
    spec = SPECS[2]
    whole = [numbered(128, s.width) for s in spec.sections]

    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan(PACK, collectives, spec, strategy=strategy)  # type: ignore[arg-type]
        rows = len(plan.positions_of(spec)) if strategy == "docs" else len(plan.positions())
        mine = [x[:rows].clone().requires_grad_() for x in whole]
        first, _, last = plan.to_heads(spec, mine)
        upstream = [torch.ones(x.shape[::-1]).double().t() for x in (first, last)]
        assert not upstream[0].is_contiguous()
        grads = torch.autograd.grad([first, last], mine, upstream, allow_unused=True)
        copies = 2 if strategy == "gather" else 1
        assert_equal(grads[0], torch.full_like(mine[0], copies))
        unused = torch.zeros_like(mine[1]) if grads[1] is None else grads[1]
        assert_equal(unused, torch.zeros_like(mine[1]))
        output = torch.ones(first.shape[0], plan.head_share(spec).output.width).double()
        output.requires_grad_()
        back = plan.from_heads(spec, output)
        (grad,) = torch.autograd.grad(back, output, torch.ones(back.shape[::-1]).double().t())
        kept = rows / len(first)
        assert float(grad.mean()) == (kept if strategy == "gather" else 1)

    run_virtual(on_rank, 2)


def test_two_plans_in_flight_do_not_meet() -> None:
    """Two micro-batches go forward before either goes backward, as in a pipeline."""
    spec, packs_of = SPECS[0], [PACK, (0, 64, 128)]

    def on_rank(collectives: VirtualCollectives) -> None:
        plans = [make_plan(cu, collectives, spec, strategy="heads") for cu in packs_of]
        inputs, outputs = [], []
        for scale, plan in enumerate(plans, 1):
            mine = [
                plan.shard(numbered(128, s.width) * scale).requires_grad_() for s in spec.sections
            ]
            inputs.append(mine)
            outputs.append(torch.cat(plan.to_heads(spec, mine), 1))
        for plan, mine, output in reversed(list(zip(plans, inputs, outputs, strict=True))):
            grads = torch.autograd.grad(output, mine, output.detach())
            for x, grad, part in zip(mine, grads, plan.head_share(spec).sections, strict=True):
                assert_equal(grad, x.detach() * part.copies)

    run_virtual(on_rank, 4)
