"""Chunks of shard views against a logical tensor whose elements know their place."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.checkpoint.views import FlatRange, ShardView
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.split import ParamLayout, take_shard


def check(view: ShardView, logical: torch.Tensor) -> int:
    """Every chunk holds what the logical tensor has there; returns the number of elements."""
    count = 0
    for chunk, tensor in view.chunks():
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        assert tensor.shape == chunk.sizes
        assert torch.equal(logical[place], tensor)
        assert view.chunk_at(chunk.offsets).data_ptr() == tensor.data_ptr()
        count += tensor.numel()
    assert view.logical_shape == logical.shape
    return count


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_range_of_a_flattened_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    logical = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, logical.numel()))
    stop = data.draw(st.integers(start, logical.numel()))
    flat = logical.view(-1)[start:stop].clone()
    if not shape and stop > start:
        flat = flat.view(())
    view = ShardView(flat, ParamLayout(), 0, FlatRange(start, shape))
    assert check(view, logical) == stop - start


@given(st.integers(1, 3), st.integers(0, 1), st.data())
def test_a_range_of_a_shard_of_a_fused_tensor(size: int, dim: int, data: st.DataObject) -> None:
    layout = Layout.sections([Layout.balanced(5, size), Layout.balanced(4, size)])
    logical = torch.arange(9 * 3).view(9, 3) if dim == 0 else torch.arange(3 * 9).view(3, 9)
    count = 0
    for rank in range(size):
        local = take_shard(logical, layout, rank, dim=dim).contiguous()
        cut = data.draw(st.integers(0, local.numel()))
        for start, stop in ((0, cut), (cut, local.numel())):
            flat_range = FlatRange(start, tuple(local.shape))
            flat = local.view(-1)[start:stop]
            count += check(ShardView(flat, ParamLayout(layout, dim), rank, flat_range), logical)
    assert count == logical.numel()


def test_a_whole_tensor_is_one_chunk() -> None:
    logical = torch.arange(6).view(2, 3)
    assert check(ShardView(logical, ParamLayout(), 0), logical) == 6
    assert check(ShardView(torch.tensor(3), ParamLayout(), 0), torch.tensor(3)) == 1


def test_a_dimension_may_be_counted_from_behind() -> None:
    logical = torch.arange(6 * 4).view(6, 4)
    layout = Layout.uneven([1, 3])
    for rank in range(2):
        local = take_shard(logical, layout, rank, dim=-1).contiguous()
        param_layout = ParamLayout(layout, dim=-1)
        assert check(ShardView(local, param_layout, rank), logical) == local.numel()
        flat_range = FlatRange(2, tuple(local.shape))
        assert check(ShardView(local.view(-1)[2:5], param_layout, rank, flat_range), logical) == 3


@pytest.mark.parametrize("rows", [2, 4], ids=["shorter", "longer"])
def test_a_tensor_that_is_not_the_shard_is_refused(rows: int) -> None:
    param_layout = ParamLayout(Layout.even(6, 2))
    for view in (
        ShardView(torch.zeros(rows, 2), param_layout, 1),
        ShardView(torch.zeros(1), param_layout, 1, FlatRange(0, (rows, 2))),
        ShardView(torch.zeros(2, 3), ParamLayout(Layout.even(6, 2), dim=2), 1),
    ):
        with pytest.raises(LayoutError, match="a shard of 3 positions on rank 1"):
            view.write_items("x")
