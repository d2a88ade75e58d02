"""Flat layouts against a buffer that is filled element by element."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.fsdp.plan.group_plan import FlatLayout, plan_flat_layout

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6
)


def owners(layout: FlatLayout) -> list[tuple[int, int] | None]:
    """For each element of the buffer its parameter and place in it, or None for padding."""
    buffer: list[tuple[int, int] | None] = [None] * layout.length
    for index, (shape, offset) in enumerate(zip(layout.shapes, layout.offsets, strict=True)):
        for element in range(math.prod(shape)):
            assert buffer[offset + element] is None, "two parameters in one place"
            buffer[offset + element] = index, element
    return buffer


@given(SHAPES, st.integers(1, 7), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.1, 0.6]))
def test_every_element_has_one_place_and_shards_end_at_rows(
    shapes: list[tuple[int, ...]], size: int, alignment: int, max_padding: float
) -> None:
    layout = plan_flat_layout(shapes, size, alignment=alignment, max_padding=max_padding)
    buffer = owners(layout)
    assert sum(place is not None for place in buffer) == layout.num_elements
    assert layout.padding == buffer.count(None)
    gaps = [place for start, end in layout.gaps for place in range(start, end)]
    assert gaps == [place for place, owner in enumerate(buffer) if owner is None]
    assert layout.shard_length % alignment == 0
    assert all(offset % alignment == 0 for offset in layout.offsets)
    for rank in range(size):
        shard = buffer[rank * layout.shard_length : (rank + 1) * layout.shard_length]
        for index, shape in enumerate(shapes):
            held = layout.shard_range(index, rank)
            mine = [place[1] for place in shard if place is not None and place[0] == index]
            assert mine == list(range(held.start, held.start + held.length))
            if mine:
                assert shard[held.offset] == (index, held.start)
            assert math.prod(layout.local_shape(index, rank)) == held.length
            whole_rows = held.start % max(1, math.prod(shape[1:])) == 0
            assert whole_rows or layout.is_cut_inside_rows(index)
            if not layout.is_cut_inside_rows(index):
                # Weight decay for what has two dimensions means the same parameters on all ranks.
                assert not shape or len(layout.local_shape(index, rank)) == len(shape)
                assert held.start % max(1, math.prod(shape[1:])) == 0
                assert held.length % max(1, math.prod(shape[1:])) == 0
                assert layout.local_shape(index, rank)[1:] == tuple(shape[1:])


@given(SHAPES, st.integers(2, 5))
def test_padding_keeps_its_limit(shapes: list[tuple[int, ...]], size: int) -> None:
    layout = plan_flat_layout(shapes, size, max_padding=0.25)
    # One element a shard is what equal shares may take in any case.
    least = -(-layout.num_elements // size)
    assert layout.shard_length <= max(least, math.floor(least / 0.75))


@given(SHAPES, st.integers(2, 4))
def test_no_smaller_share_fits_the_given_order(shapes: list[tuple[int, ...]], size: int) -> None:
    """Brute force over the padding before each parameter, for all smaller shares."""
    layout = plan_flat_layout(shapes, size, max_padding=0.9)
    if not layout.is_row_aligned:
        return
    least = -(-layout.num_elements // size)
    rows = [max(1, math.prod(shape[1:])) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    for shard in range(least, min(layout.shard_length, least + 40)):
        assert not _fits(rows, numels, shard, size), f"shard {shard} is enough"


def _fits(rows: list[int], numels: list[int], shard: int, size: int) -> bool:
    ends = {0}
    for row, numel in zip(rows, numels, strict=True):
        after = set()
        for end in ends:
            for start in range(end, shard * size - numel + 1):
                cuts = range(shard, shard * size, shard)
                if all((cut - start) % row == 0 for cut in cuts if start < cut < start + numel):
                    after.add(start + numel)
                    break
        ends = after
    return bool(ends)


def test_a_block_of_a_transformer_needs_little_padding() -> None:
    d = 768
    shapes = [
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    ]
    for size in (2, 3, 4, 8, 64):
        layout = plan_flat_layout(shapes, size, alignment=8)
        assert layout.is_row_aligned
        assert layout.padding <= 0.03 * layout.length


def test_it_says_when_it_cuts_rows() -> None:
    layout = plan_flat_layout([(3, 1000)], 4)
    assert not layout.is_row_aligned
    assert layout.shard_length == 750
    assert "cut inside rows of 1 parameters" in layout.describe()
    assert layout.local_shape(0, 1) == (750,)


@pytest.mark.parametrize("size", [1, 4])
def test_scalars_and_empty_parameters(size: int) -> None:
    layout = plan_flat_layout([(), (0, 3), (2,)], size)
    assert layout.num_elements == 3
    assert sum(math.prod(layout.local_shape(0, rank)) for rank in range(size)) == 1


@pytest.mark.parametrize("max_padding", [0.0, 0.3])
def test_only_what_is_cut_inside_rows_loses_its_dimensions(max_padding: float) -> None:
    layout = plan_flat_layout([(2, 2), (3, 7), (4, 2)], 2, max_padding=max_padding)
    cut = [layout.is_cut_inside_rows(index) for index in range(3)]
    assert cut == ([False, True, False] if max_padding == 0 else [False] * 3)
    dims = [len(layout.local_shape(index, rank)) for index in range(3) for rank in range(2)]
    assert dims == ([2, 2, 1, 1, 2, 2] if max_padding == 0 else [2] * 6)
