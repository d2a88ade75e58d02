"""Values that are equal have equal hashes, in whatever order their parts were named."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.checkpoint.views import FlatRange, ShardView
from pcomm.core.collectives.protocol import Call
from pcomm.core.exchange.exchange import Exchange
from pcomm.core.exchange.fast import RowMoves
from pcomm.core.exchange.positions import Permutation
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.layout import Layout, Run
from pcomm.core.tensor_parallel.split import ParamLayout
from pcomm.core.topology import Topology

SIZE = 3

layouts = st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE).map(Layout.uneven)
options = st.builds(
    CommOptions,
    timeout_s=st.none() | st.sampled_from([1.0, 2.0]),
    threads=st.none() | st.integers(1, 2),
    interface=st.none() | st.just("lo"),
    high_priority=st.none() | st.booleans(),
    strict=st.booleans(),
)
param_layouts = st.builds(
    ParamLayout,
    st.none() | layouts,
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from(["dense", "expert"]),
)
specs = st.builds(
    GroupSpec, st.sampled_from(["dp", "tp"]), st.sampled_from(["", "gather"]), options
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = {"dp": 2, "tp": 2, "pp": draw(st.integers(1, 2))}
    names = draw(st.permutations(sorted(sizes)))
    order = draw(st.permutations(sorted(sizes)))
    failed = draw(st.sets(st.integers(4, 7), max_size=1))
    topology = Topology({n: sizes[n] for n in names}, order, offset=4, failed=failed)
    if draw(st.booleans()):
        axes = draw(st.permutations(["ep", "etp"]))
        view = {axis: 2 if axis == "ep" else topology.world_size // 2 for axis in axes}
        topology = topology.view("expert", view, ("etp", "ep"))
    return topology


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    rows, columns = Layout.even(6, SIZE), Layout.even(3, SIZE)
    parts = {0: (rows, Layout.whole(6, SIZE)), 1: (Layout.whole(3, SIZE), columns)}
    before, after = draw(st.permutations([0, 1])), draw(st.permutations([0, 1]))
    to_columns = draw(st.booleans())
    source = {dim: parts[dim][0 if to_columns else 1] for dim in before}
    return Exchange(source, {dim: parts[dim][1 if to_columns else 0] for dim in after})


@pytest.mark.parametrize(
    "values",
    [layouts, options, param_layouts, specs, topologies(), exchanges()],
    ids=["Layout", "CommOptions", "ParamLayout", "GroupSpec", "Topology", "Exchange"],
)
def test_what_is_equal_has_one_hash(values: st.SearchStrategy[Hashable]) -> None:
    @given(values, values)
    def check(one: Hashable, other: Hashable) -> None:
        if one == other:
            assert hash(one) == hash(other)
            assert len({one, other}) == 1
        else:
            assert len({one, other}) == 2

    check()


def test_the_order_in_which_axes_and_dimensions_are_named_does_not_count() -> None:
    one = Topology({"dp": 2, "tp": 4}, order=("tp", "dp"))
    other = Topology({"tp": 4, "dp": 2}, order=("tp", "dp"))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Topology({"dp": 2, "tp": 4}, order=("dp", "tp"))
    # What ranks compare before they open groups is equal as well.
    assert one.describe() == other.describe()
    views = {"a": {"ep": 8}, "b": {"x": 2, "y": 4}}
    for name in ("a", "b"):
        one = one.view(name, views[name])
    for name in ("b", "a"):
        other = other.view(name, views[name])
    assert one == other
    assert hash(one) == hash(other)
    assert one.describe() == other.describe()
    rows, columns = Layout.even(6, SIZE), Layout.even(3, SIZE)
    whole_rows, whole_columns = Layout.whole(6, SIZE), Layout.whole(3, SIZE)
    first = Exchange({0: rows, 1: whole_columns}, {0: whole_rows, 1: columns})
    second = Exchange({1: whole_columns, 0: rows}, {1: columns, 0: whole_rows})
    assert first == second
    assert hash(first) == hash(second)
    assert first != first.inverse
    assert first == Exchange(first.source, first.target, None)
    assert first != Exchange(first.source, first.target, (2, 1, 0))


def test_a_layout_of_narrow_integers_is_that_of_wide_ones() -> None:
    wide = Layout(4, [[Run(0, 1)], [Run(1, 4)]])
    for code in "hilq":
        narrow = Layout.of_edges(4, [array(code, [0, 1]), array(code, [1, 4])])
        assert narrow == wide
        assert hash(narrow) == hash(wide)
        assert narrow.is_partition


def test_what_an_exchange_was_made_from_may_change_afterwards() -> None:
    rows = {0: Layout.even(6, SIZE)}
    exchange = Exchange(rows, {0: Layout.uneven([1, 2, 3])})
    before = hash(exchange)
    rows[0] = Layout.uneven([6, 0, 0])
    assert exchange.source == {0: Layout.even(6, SIZE)}
    assert hash(exchange) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShardView(torch.ones(3), ParamLayout(), 0, FlatRange(0, (3,))),
        lambda: Call("all_gather", torch.ones(3)),
        lambda: RowMoves((1,), (1,), Permutation.of(torch.arange(2)), None),
        lambda: Permutation.of(torch.arange(2)),
    ],
    ids=["ShardView", "Call", "RowMoves", "Permutation"],
)
def test_what_holds_tensors_is_compared_by_identity(make: Callable[[], object]) -> None:
    """Comparing tensors gives tensors, of which several have no truth value."""
    one = make()
    assert one != make()
    assert one in [make(), one]
    assert len({one, one, make()}) == 2
