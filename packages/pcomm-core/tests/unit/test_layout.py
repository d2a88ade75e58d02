"""Layouts: what each rank holds, and what is refused."""

from __future__ import annotations

import math
import pickle
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout, Run


@given(units=st.integers(0, 40), size=st.integers(1, 7), unit=st.integers(1, 5))
def test_balanced_gives_whole_units_that_differ_by_at_most_one(
    units: int, size: int, unit: int
) -> None:
    layout = Layout.balanced(units * unit, size, unit=unit)
    assert layout.is_partition
    assert layout.is_contiguous
    shares = [own // unit for own in layout.sizes]
    assert all(own % unit == 0 for own in layout.sizes)
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(units=st.integers(0, 40), size=st.integers(1, 7), unit=st.integers(1, 5))
def test_cuts_are_floors_of_equal_fractions(units: int, size: int, unit: int) -> None:
    layout = Layout.cuts(units * unit, size, unit=unit)
    assert layout.is_contiguous
    shares = [own // unit for own in layout.sizes]
    assert max(shares) - min(shares) <= 1
    assert [sum(layout.sizes[:i]) for i in range(size)] == [
        math.floor(Fraction(i * units, size)) * unit for i in range(size)
    ]


def test_cuts_and_balanced_put_the_larger_shards_elsewhere() -> None:
    assert Layout.cuts(10, 4).sizes == (2, 3, 2, 3)
    assert Layout.balanced(10, 4).sizes == (3, 3, 2, 2)
    # Cuts at equal fractions are equal, whatever the number of ranks.
    halves, quarters = Layout.cuts(22_680, 36), Layout.cuts(22_680, 72)
    assert {run.start for own in halves.runs for run in own} <= {
        run.start for own in quarters.runs for run in own
    }
    assert sum(Layout.balanced(14, 4).sizes[:2]) == 8 > Layout.balanced(14, 2).sizes[0]
    assert sum(Layout.cuts(14, 4).sizes[:2]) == 7 == Layout.cuts(14, 2).sizes[0]


@given(units=st.integers(0, 9), copies=st.integers(1, 4), size=st.integers(1, 6),
       unit=st.integers(1, 3))  # fmt: skip
def test_repeated_units_are_dealt_out_like_a_list(
    units: int, copies: int, size: int, unit: int
) -> None:
    if units * copies % size:
        with pytest.raises(LayoutError, match=f"{units * copies} in all"):
            Layout.repeated(units * unit, size, unit=unit, copies=copies)
        return
    layout = Layout.repeated(units * unit, size, unit=unit, copies=copies)
    deal = [u * unit + i for u in range(units) for _ in range(copies) for i in range(unit)]
    each = len(deal) // size
    assert [layout.positions(r) for r in range(size)] == [
        deal[r * each : (r + 1) * each] for r in range(size)
    ]
    assert layout.is_cover
    assert layout.is_partition == (copies == 1 or not units)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_cover_has_no_gap_and_may_overlap() -> None:
    assert Layout(4, ((Run(0, 3),), (Run(1, 4),))).is_cover
    assert not Layout(4, ((Run(0, 1),), (Run(2, 4),))).is_cover
    assert not Layout(4, ((Run(1, 4),), (Run(1, 2),))).is_cover
    assert not Layout(4, ((Run(0, 3),), ())).is_cover


def test_what_is_derived_is_made_once_and_not_pickled() -> None:
    layout, made = Layout.even(4, 2), []

    def make(one: Layout) -> list[int]:
        made.append(one)
        return [one.length]

    assert layout.derived(make) is layout.derived(make)
    assert made == [layout]
    assert "_derived" not in pickle.loads(pickle.dumps(layout)).__dict__


@given(share=st.integers(0, 9), size=st.integers(1, 7), unit=st.integers(1, 5))
def test_even_equals_balanced_where_it_divides(share: int, size: int, unit: int) -> None:
    length = share * size * unit
    assert Layout.even(length, size, unit=unit) == Layout.balanced(length, size, unit=unit)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_positions_of_all_ranks_are_the_dimension(sizes: list[int]) -> None:
    layout = Layout.uneven(sizes)
    assert list(layout.sizes) == sizes
    everything = [p for rank in range(layout.size) for p in layout.positions(rank)]
    assert everything == list(range(layout.length))


def test_sections_shift_each_part_and_keep_the_order_within_a_rank() -> None:
    queries, keys = Layout.even(8, 2, unit=2), Layout.uneven([2, 4])
    fused = Layout.sections([queries, keys])
    assert fused.positions(0) == [0, 1, 2, 3, 8, 9]
    assert fused.positions(1) == [4, 5, 6, 7, 10, 11, 12, 13]
    assert fused.is_partition
    assert not fused.is_contiguous


def test_whole_is_not_a_partition_unless_alone() -> None:
    assert Layout.whole(4, 2).is_whole
    assert not Layout.whole(4, 2).is_partition
    assert Layout.whole(4, 1).is_partition
    assert not Layout(4, ((Run(2, 4), Run(0, 2)),)).is_whole


@st.composite
def dealt_runs(draw: st.DrawFn) -> tuple[int, list[list[Run]]]:
    """Runs on up to 4 ranks, in any order: sound ones, and all that can be wrong with them."""
    runs = st.builds(Run, st.integers(-1, 9), st.integers(-1, 9))
    return 8, draw(st.lists(st.lists(runs, max_size=3), min_size=1, max_size=4))


@given(dealt_runs())
def test_what_is_refused_and_what_is_a_partition_is_what_the_positions_say(
    dealt: tuple[int, list[list[Run]]],
) -> None:
    length, own = dealt
    is_sound = all(
        all(0 <= run.start < run.stop <= length for run in runs)
        and len({p for run in runs for p in range(*run)}) == sum(run.length for run in runs)
        for runs in own
    )
    if not is_sound:
        with pytest.raises(LayoutError):
            Layout(length, own)
        return
    layout = Layout(length, own)
    everything = sorted(p for rank in range(layout.size) for p in layout.positions(rank))
    assert layout.is_partition == (everything == list(range(length)))
    assert layout.is_cover == (set(everything) == set(range(length)))
    assert layout.runs == tuple(tuple(runs) for runs in own)
    assert layout.sizes == tuple(sum(run.length for run in runs) for runs in own)


def test_edges_and_runs_are_two_ways_to_say_the_same() -> None:
    runs = ((Run(4, 6), Run(0, 1)), (), (Run(1, 4),))
    layout = Layout(6, runs)
    assert [own.tolist() for own in layout.edges] == [[4, 6, 0, 1], [], [1, 4]]
    same = Layout.of_edges(6, layout.edges)
    assert (same, hash(same), same.runs) == (layout, hash(layout), runs)
    assert same != Layout(6, (runs[2], (), runs[0]))
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert repr(Layout.even(2, 2)) == (
        "Layout(length=2, runs=((Run(start=0, stop=1),), (Run(start=1, stop=2),)))"
    )
    with pytest.raises(LayoutError, match="rank 0 has runs 0-2,2-3"):
        Layout.of_edges(6, [array("q", [0, 3, 2, 4])])


def test_touching_runs_count_as_one() -> None:
    split = Layout(6, ((Run(0, 2), Run(2, 3)), (Run(3, 6),)))
    assert split.is_contiguous
    assert split.describe() == "6 positions: 0-1,2-2 | 3-5"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Layout.even(10, 4), "a remainder of 2"),
        (lambda: Layout.even(10, 2, unit=3), "units of 3"),
        (lambda: Layout.balanced(4, 0), "over 0 ranks"),
        (lambda: Layout.cuts(10, 2, unit=3), "units of 3"),
        (lambda: Layout.repeated(4, 2, copies=0), "0 copies of each"),
        (lambda: Layout.uneven([1, -1]), "rank 1 has size -1"),
        (lambda: Layout(4, ()), "no ranks"),
        (lambda: Layout(-1, ((),)), "-1 positions"),
        (lambda: Layout.whole(-1, 2), "-1 positions"),
        (lambda: Layout.of_edges(-1, [array("q")], are_sound=True), "-1 positions"),
        (lambda: Layout(4, ((Run(0, 5),),)), "0-4"),
        (lambda: Layout(4, ((Run(-1, 2),),)), "rank 0 has runs -1-1"),
        (lambda: Layout(4, ((Run(0, 3), Run(2, 4)),)), "0-2,2-3"),
        (lambda: Layout(4, ((Run(2, 2),),)), "2-1"),
        (lambda: Layout.sections([Layout.even(4, 2), Layout.even(4, 4)]), r"\[2, 4\]"),
    ],
)
def test_mistakes_are_named(build: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        build()  # type: ignore[operator]
