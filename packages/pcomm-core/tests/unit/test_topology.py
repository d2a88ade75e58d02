"""Topology against brute force, its proofs, and its cost at 100,000 ranks."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import TopologyError
from pcomm.core.topology import Topology

NAMES = ("a", "b", "c", "d")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = dict(zip(NAMES, sizes, strict=False))
    order = draw(st.permutations(list(axes)))
    return Topology(axes, order, offset=draw(st.integers(0, 5)))


def every_coordinate(topology: Topology) -> list[dict[str, int]]:
    """All coordinates, slowest axis outermost: written without strides, as an oracle."""
    slow_to_fast = tuple(reversed(topology.order))
    ranges = [range(topology.axes[axis]) for axis in slow_to_fast]
    return [dict(zip(slow_to_fast, point, strict=True)) for point in itertools.product(*ranges)]


@given(topologies())
def test_coordinates_count_through_the_ranks_in_order(topology: Topology) -> None:
    for rank, point in zip(topology.ranks, every_coordinate(topology), strict=True):
        assert topology.coordinates(rank) == point
        assert topology.rank(point) == rank


@given(topologies(), st.data())
def test_members_and_groups_equal_brute_force(topology: Topology, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(topology.order), min_size=1, unique=True))
    failed = data.draw(st.sets(st.sampled_from(topology.ranks), max_size=3))
    by_rest: dict[tuple[int, ...], list[int]] = {}
    points = dict(zip(topology.ranks, every_coordinate(topology), strict=True))
    for rank, point in points.items():
        rest = tuple(point[axis] for axis in topology.order if axis not in axes)
        by_rest.setdefault(rest, []).append(rank)
    damaged = topology.with_failed(failed)
    for group in by_rest.values():
        expected = tuple(rank for rank in group if rank not in failed)
        assert all(damaged.members(rank, axes) == expected for rank in group)
    alive = [tuple(r for r in group if r not in failed) for group in by_rest.values()]
    assert sorted(damaged.groups(axes)) == sorted(group for group in alive if group)


@given(topologies(), st.data())
def test_same_members_is_decided_as_by_writing_all_groups_out(
    topology: Topology, data: st.DataObject
) -> None:
    others = data.draw(st.permutations(list(topology.axes)))
    sizes = [topology.axes[axis] for axis in data.draw(st.permutations(list(topology.axes)))]
    both = topology.view("other", dict(zip(others, sizes, strict=True)), shared=())
    for one in _subsets(topology.order):
        for other in _subsets(tuple(others)):
            key = "other." + "_".join(other)
            equal = sorted(both.groups(one)) == sorted(both.groups(key))
            assert both.have_same_members(one, key) == equal


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [c for n in range(1, len(names) + 1) for c in itertools.combinations(names, n)]


def test_a_view_shares_what_it_names_and_refuses_other_members() -> None:
    dense = Topology({"pp": 2, "dp": 4, "cp": 1, "tp": 2})
    experts = dense.view("expert", {"pp": 2, "edp": 2, "ep": 4, "etp": 1})
    assert experts.have_same_members("dp_cp_tp", "expert.edp_ep")
    assert experts.members(5, "expert.ep") == (4, 5, 6, 7)
    assert experts.have_same_members("pp", "expert.pp")
    with pytest.raises(TopologyError, match=r"rank 0 has members \[0, 8\] .* \[0, 1\] in the view"):
        dense.view("expert", {"edp": 2, "ep": 4, "pp": 2})
    with pytest.raises(TopologyError, match="multiply to 16"):
        dense.view("expert", {"edp": 3, "ep": 4})


def test_the_default_order_makes_the_last_axis_the_fastest() -> None:
    assert Topology({"dp": 2, "tp": 2}).members(0, "tp") == (0, 1)
    assert Topology({"dp": 2, "tp": 2}, ("dp", "tp")).members(0, "tp") == (0, 2)


def test_keys_have_one_spelling() -> None:
    topology = Topology({"dp": 2, "cp": 2, "tp": 2}).view("expert", {"edp": 4, "ep": 2})
    assert topology.canonical_name("cp_dp") == topology.canonical_name(["dp", "cp"]) == "dp_cp"
    assert topology.canonical_name("expert.ep_edp") == "expert.edp_ep"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Topology({"dp": 0}), "size 0"),
        (lambda: Topology({"d_p": 2}), "'d_p'"),
        (lambda: Topology({"dp": 2, "tp": 2}, ("dp",)), "exactly once"),
        (lambda: Topology({"dp": 2}, offset=-1), "offset -1"),
        (lambda: Topology({"dp": 2}, failed=[2]), "rank 2"),
        (lambda: Topology({"dp": 2}).members(0, "pd"), "'dp'"),
        (lambda: Topology({"dp": 2}).members(0, "dp_dp"), "twice"),
        (lambda: Topology({"dp": 2}).members(2, "dp"), "ranks 0 to 1"),
        (lambda: Topology({"dp": 2}).members(0, "expert.ep"), "view 'expert'"),
        (lambda: Topology({"dp": 2}).rank({"dp": 2}), "dp=2"),
        (lambda: Topology({"dp": 2}).rank({}), "axes are"),
        (lambda: Topology({"dp": 2}).view("x y", {"ep": 2}), "'x y'"),
        (lambda: Topology({"dp": 2}).view("e", {"ep": 2}, shared=["dp"]), "shared axis 'dp'"),
    ],
)
def test_mistakes_are_named(build: object, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        build()  # type: ignore[operator]


def test_a_topology_survives_pickling_and_describes_itself() -> None:
    topology = Topology({"dp": 2, "tp": 2}, offset=4, failed=[5]).view("expert", {"ep": 4})
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    assert hash(copy) == hash(topology)
    assert topology.describe() == "tp2xdp2, offset 4, expert: ep4, offset 4, failed [5], failed [5]"


def test_a_hundred_thousand_ranks_take_little_memory() -> None:
    tracemalloc.start()
    topology = Topology({"pp": 10, "dp": 125, "cp": 10, "tp": 8})
    topology = topology.view("expert", {"pp": 10, "edp": 625, "ep": 16}).with_failed([17])
    for axes in ("pp", "dp", "cp", "tp", "dp_cp", "pp_tp", "expert.edp", "expert.ep"):
        assert 99_999 in topology.members(99_999, axes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert topology.world_size == 100_000
    # The largest group has 1,250 ranks; one that wrote out all groups would need megabytes.
    assert peak_bytes < 500_000
