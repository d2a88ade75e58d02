"""Positions written out from runs, against the lists that a layout gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.exchange.positions import (
    expand_ranges,
    inverse_order,
    layout_edges,
    rank_order,
    run_edges,
    run_ranks,
)
from pcomm.core.layout import Layout, Run


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=20))
def test_ranges_are_written_out_one_after_another(ranges: list[tuple[int, int]]) -> None:
    starts = torch.tensor([start for start, _ in ranges], dtype=torch.int64)
    lengths = torch.tensor([length for _, length in ranges], dtype=torch.int64)
    expected = [start + i for start, length in ranges for i in range(length)]
    assert expand_ranges(starts, lengths).tolist() == expected


def test_edges_of_runs_and_of_none() -> None:
    assert run_edges((Run(4, 6), Run(0, 1))).tolist() == [[4, 6], [0, 1]]
    assert run_edges(()).shape == (0, 2)


def test_edges_and_ranks_of_the_runs_of_a_layout() -> None:
    layout = Layout(8, ((Run(6, 8), Run(0, 2)), (), (Run(2, 6),)))
    assert layout_edges(layout).tolist() == [[6, 8], [0, 2], [2, 6]]
    assert run_ranks(layout).tolist() == [0, 0, 2]
    nothing = Layout.uneven([0, 0])
    assert layout_edges(nothing).shape == (0, 2)
    assert run_ranks(nothing).shape == (0,)


def test_the_order_of_the_ranks_and_its_inverse() -> None:
    layout = Layout(8, ((Run(6, 8), Run(0, 2)), (), (Run(2, 6),)))
    order = rank_order(layout)
    assert order.tolist() == [p for rank in range(3) for p in layout.positions(rank)]
    assert order[inverse_order(order)].tolist() == list(range(8))
    assert inverse_order(order)[order].tolist() == list(range(8))
