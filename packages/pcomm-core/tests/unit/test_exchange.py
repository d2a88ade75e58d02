"""Exchanges between arbitrary layouts, on virtual ranks, against the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import LayoutError
from pcomm.core.exchange.exchange import Exchange
from pcomm.core.layout import Layout, Run
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual


def region(whole: Tensor, layouts: dict[int, Layout], rank: int) -> Tensor:
    """What `rank` holds of `whole`, by listing positions: the oracle."""
    for dim, layout in layouts.items():
        whole = whole.index_select(dim, torch.tensor(layout.positions(rank), dtype=torch.int64))
    return whole


def test_a_gradient_that_is_not_contiguous_is_exchanged_right() -> None:
    plan = Exchange(
        {0: Layout.even(8, 2), 1: Layout.whole(4, 2)}, {0: Layout.whole(8, 2), 1: Layout.even(4, 2)}
    )
    weights = torch.randn(4, 8).t()

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = torch.zeros(4, 4, requires_grad=True)
        upstream = weights[:, collectives.rank * 2 : collectives.rank * 2 + 2]
        assert not upstream.is_contiguous()
        plan.apply(mine, collectives).backward(upstream)
        assert mine.grad is not None
        assert_equal(mine.grad, weights[collectives.rank * 4 : collectives.rank * 4 + 4])

    run_virtual(on_rank, 2)


def test_rows_in_a_thousand_runs_move_in_one_message_and_come_back() -> None:
    """As a pack of many sequences does: only the first dimension is split, by many runs."""
    size, each = 4, 250
    runs = [Run(8 * i + 2 * part, 8 * i + 2 * part + 2) for i in range(each) for part in range(4)]
    dealt = Layout(2000, tuple(tuple(runs[rank::size]) for rank in range(size)))
    plan = Exchange({0: dealt}, {0: Layout.uneven([500, 0, 1400, 100])})
    whole = torch.arange(2000.0)[:, None] + torch.arange(3.0)

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        plan.prepare(spy.rank, torch.device("cpu"))
        mine = region(whole, plan.source, spy.rank).requires_grad_()
        there = plan.apply(mine, spy)
        assert_equal(there.detach(), region(whole, plan.target, spy.rank))
        assert spy.sent_bytes == plan.sent_elements(spy.rank, mine.shape) * 4
        (gradient,) = torch.autograd.grad(there, mine, there.detach() * 2)
        assert_equal(gradient, mine.detach() * 2)
        assert spy.counts == {"all_to_all": 2}

    run_virtual(on_rank, size)


def test_alone_it_is_the_identity_and_can_still_reorder() -> None:
    x = torch.arange(4.0)
    same = Exchange({0: Layout.even(4, 1)}, {0: Layout.even(4, 1)})
    assert same.apply(x, IdentityCollectives()) is x
    swapped = Exchange({0: Layout.even(4, 1)}, {0: Layout(4, ((Run(2, 4), Run(0, 2)),))})
    assert swapped.apply(x, IdentityCollectives()).tolist() == [2.0, 3.0, 0.0, 1.0]


HALVES, WHOLE = Layout.even(4, 2), Layout.whole(4, 2)
SAME_HALF = Layout(4, ((Run(0, 2),), (Run(0, 2),)))
PART = Layout(4, ((Run(0, 3),), (Run(1, 4),)))
GRID = {0: HALVES, 1: WHOLE}


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({0: HALVES}, {1: HALVES}, "before and"),
        ({0: HALVES}, {0: Layout.even(6, 2)}, r"\(6, 2\)"),
        ({0: HALVES}, {0: Layout.even(4, 4)}, r"\(4, 4\)"),
        ({0: SAME_HALF}, {0: HALVES}, "source .*(?s:.)not every position of dimension 0"),
        ({0: HALVES}, {0: SAME_HALF}, "target .*(?s:.)not every position of dimension 0"),
        (GRID, {0: HALVES, 1: HALVES}, r"target .*(?s:.)ranks hold \[4, 4\] elements of 16"),
        ({0: PART, 1: PART}, GRID, "source .*(?s:.)regions of ranks 0 and 1 overlap in part"),
        ({-1: HALVES}, {-1: HALVES}, "dimensions >= 0"),
        ({}, {}, "before and"),
    ],
)
def test_sides_that_do_not_describe_one_tensor_are_refused(
    source: dict[int, Layout], target: dict[int, Layout], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        Exchange(source, target)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_of_no_layout_is_refused(rank: int) -> None:
    # By rows, and by the general way.
    columns = Exchange({0: HALVES, 1: WHOLE}, {0: WHOLE, 1: HALVES})
    for plan in (Exchange({0: HALVES}, {0: Layout.uneven([1, 3])}), columns):
        with pytest.raises(LayoutError, match=f"rank {rank}"):
            plan.sent_elements(rank, [2, 4])
        with pytest.raises(LayoutError, match=f"rank {rank}"):
            plan.prepare(rank, torch.device("cpu"))


def test_a_tensor_or_group_of_another_size_is_refused_before_anything_is_sent() -> None:
    plan = Exchange({0: HALVES}, {0: Layout.uneven([1, 3])})
    with pytest.raises(LayoutError, match="a group of 1 ranks"):
        plan.apply(torch.zeros(2), IdentityCollectives())

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        with pytest.raises(LayoutError, match=r"shape \(3,\)"):
            plan.apply(torch.zeros(3), spy)
        assert not spy.calls

    run_virtual(on_rank, 2)
