"""Split layers on virtual ranks: what they send, second derivatives, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core_support.split_layers import LayerCase
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from pcomm.core.testing.assertions import assert_close
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

LAYOUT = Layout.uneven([5, 0, 2])
SENT = {
    "column": (LayerCase("column", LAYOUT), {}, {"all_reduce": 1}),
    "column, gathered": (
        LayerCase("column", LAYOUT, gather_output=True),
        {"all_gather": 1},
        {"all_reduce": 1},
    ),
    "column, sequence": (
        LayerCase("column", LAYOUT, sequence_parallel=True),
        {"all_gather": 1},
        {"reduce_scatter": 1},
    ),
    "row": (LayerCase("row", LAYOUT, bias=True), {"all_reduce": 1}, {}),
    "row, sequence": (
        LayerCase("row", LAYOUT, bias=True, sequence_parallel=True),
        {"reduce_scatter": 1},
        {"all_gather": 1},
    ),
    "embedding": (LayerCase("embedding", LAYOUT), {"all_reduce": 1}, {}),
    "embedding, sequence": (
        LayerCase("embedding", LAYOUT, sequence_parallel=True),
        {"reduce_scatter": 1},
        {"all_gather": 1},
    ),
}


@pytest.mark.parametrize(
    ("case", "forward", "backward"), SENT.values(), ids=[name.replace(" ", "_") for name in SENT]
)
def test_layers_communicate_once_where_they_must(
    case: LayerCase, forward: dict[str, int], backward: dict[str, int]
) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        layer = case.build(spy, torch.float64)
        x = torch.ones(case.tokens, case.layout.length if case.kind == "row" else case.width)
        x = torch.zeros(case.tokens, dtype=torch.int64) if case.kind == "embedding" else x.double()
        own = case.own_input(x, collectives.rank).detach()
        output = layer(own.requires_grad_() if own.is_floating_point() else own)
        assert spy.counts == forward
        spy.clear()
        output.sum().backward()
        assert spy.counts == backward

    run_virtual(on_rank, 3)


@pytest.mark.parametrize("gathered", [False, True])
def test_second_derivatives_equal_those_of_the_plain_layers(gathered: bool) -> None:
    """A gradient penalty, whose own gradient goes through each border three times."""
    generator = torch.Generator().manual_seed(0)
    layout = Layout.uneven([2, 3])
    up, down = torch.randn(2, 4, 5, generator=generator).double()
    x = torch.randn(6, 4, generator=generator).double().requires_grad_()

    def slope_of_penalty(output: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), x)[0]

    hidden = (x @ up).tanh()
    expected = slope_of_penalty(hidden if gathered else hidden @ down.t(), x)

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = x.detach().clone().requires_grad_()
        positions = layout.positions(collectives.rank)
        column = ColumnParallelLinear(
            4, layout, collectives, gather_output=gathered, dtype=torch.float64
        )
        column.load_state_dict({"weight": up.t()[positions]})
        own = column(mine).tanh()
        if not gathered:
            row = RowParallelLinear(layout, 4, collectives, dtype=torch.float64)
            row.load_state_dict({"weight": down[:, positions]})
            own = row(own)
        # Five chained sums of at most 6 terms, each magnified by the sums before it.
        assert_close(slope_of_penalty(own, mine), expected, num_terms=6**3)

    run_virtual(on_rank, 2)


def test_autocast_gives_the_dtype_of_the_plain_layer() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        layer = RowParallelLinear(Layout.even(4, 2), 3, collectives, bias=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(2, 2)).dtype == torch.bfloat16

    run_virtual(on_rank, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda c: ColumnParallelLinear(4, Layout.even(6, 3), c), "a layout over 3 ranks"),
        (lambda c: RowParallelLinear(Layout.whole(4, 2), 4, c), "several ranks hold"),
        (
            lambda c: ColumnParallelLinear(
                4, Layout.sections([Layout.even(4, 2)] * 2), c, gather_output=True
            ),
            "not lie one after another",
        ),
        (
            lambda c: VocabularyParallelEmbedding(Layout.sections([Layout.even(4, 2)] * 2), 4, c),
            "not lie one after another",
        ),
        (
            lambda c: VocabularyParallelEmbedding(Layout.even(4, 2), 4, c)(torch.tensor([1, 4])),
            "ids 1 to 4",
        ),
        (
            lambda c: RowParallelLinear(Layout.even(4, 2), 4, c, sequence_parallel=True)(
                torch.zeros(3, 2)
            ),
            "3 positions over 2 ranks",
        ),
    ],
)
def test_mistakes_are_refused_on_every_rank(build: object, words: str) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        with pytest.raises(LayoutError, match=words):
            build(collectives)  # type: ignore[operator]

    run_virtual(on_rank, 2)
