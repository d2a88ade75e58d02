"""Shards of parameters: cut, joined, and found by the name of the parameter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout, Run
from pcomm.core.tensor_parallel.split import (
    ParamLayout,
    join_shards,
    param_layouts_of,
    take_shard,
)
from pcomm.core.testing.assertions import assert_equal


@st.composite
def partitions(draw: st.DrawFn) -> Layout:
    """A dimension cut anywhere, its pieces dealt to 1 to 4 ranks in any order."""
    length, size = draw(st.integers(0, 10)), draw(st.integers(1, 4))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set()
    edges = sorted({0, *cuts, length})
    own: list[list[Run]] = [[] for _ in range(size)]
    for start, stop in draw(st.permutations(list(pairwise(edges)))):
        own[draw(st.integers(0, size - 1))].append(Run(start, stop))
    return Layout(length, tuple(map(tuple, own)))


@given(partitions(), st.integers(-3, 2), st.sampled_from([torch.float64, torch.int8]))
def test_shards_hold_the_positions_of_the_layout_and_join_to_the_whole(
    layout: Layout, dim: int, dtype: torch.dtype
) -> None:
    shape = [2, 3, 1]
    shape[dim] = layout.length
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    shards = [take_shard(whole, layout, rank, dim=dim) for rank in range(layout.size)]
    for rank, shard in enumerate(shards):
        positions = torch.tensor(layout.positions(rank), dtype=torch.int64)
        assert_equal(shard.contiguous(), whole.index_select(dim, positions))
        param_layout = ParamLayout(layout, dim)
        assert param_layout.logical_shape(shard.shape) == whole.shape
    assert_equal(join_shards(shards, layout, dim=dim), whole)


def test_one_run_is_a_view_and_several_are_a_copy() -> None:
    whole = torch.zeros(4, 2)
    take_shard(whole, Layout.even(4, 2), 1).fill_(1)
    assert whole.sum() == 4
    take_shard(whole, Layout.sections([Layout.even(2, 2)] * 2), 1).fill_(5)
    assert whole.sum() == 4


def test_replicated_shards_join_to_one_of_them() -> None:
    whole = torch.arange(3.0)
    assert_equal(join_shards([whole, whole], Layout.whole(3, 2)), whole)


def test_parameters_are_found_in_nested_modules_and_the_rest_is_whole() -> None:
    split = ParamLayout(Layout.even(4, 2), dim=1)
    inner = nn.Linear(2, 2)
    inner.param_layouts = {"weight": split}  # type: ignore[assignment]
    model = nn.ModuleDict({"a": nn.Sequential(inner), "b": nn.LayerNorm(2)})
    found = param_layouts_of(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert found["a.0.weight"] is split
    assert found["a.0.weight"].is_split
    assert all(found[name] == ParamLayout() for name in found if name != "a.0.weight")
    assert not found["b.weight"].is_split
    assert not ParamLayout(Layout.even(4, 1)).is_split


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: take_shard(torch.zeros(5, 2), Layout.even(4, 2), 0), r"\(5, 2\) along dim 0"),
        (lambda: take_shard(torch.zeros(2, 3), Layout.even(4, 2), 0, dim=1), "holds 4 positions"),
        (lambda: join_shards([torch.zeros(2)], Layout.even(4, 2)), "1 shards"),
        (lambda: join_shards([torch.zeros(2), torch.zeros(3)], Layout.even(4, 2)), "holds 2"),
        (lambda: join_shards([torch.zeros(2)], Layout(4, ((Run(0, 1), Run(2, 3)),))), "0-0,2-2"),
        (lambda: join_shards([torch.zeros(2)], Layout(4, ((Run(0, 2),),))), "without holes"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(run: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        run()  # type: ignore[operator]
