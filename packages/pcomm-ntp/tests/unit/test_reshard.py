"""State that goes from plan to plan, between threads, against slices of a dense reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor

from ntp_support.logical_state import LogicalState, alive, on_living_ranks, state_units
from pcomm.core import Topology
from pcomm.core.collectives import SpyCollectives
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing import assert_equal
from pcomm.ntp import Coord, Failures, NtpPlan, Policy, plan
from pcomm.ntp.redistribute import Moved, redistribute

UNITS = state_units(5)


def assert_resharded(old, new, *, newcomers=(), state=None, round_bytes=1 << 20):
    """Reshard, compare every tensor of every rank bit by bit, and bytes with what was lacking."""
    whole = state or LogicalState.random(UNITS, stages=old.topology.axes.get("pp", 1))
    holders = (set(alive(old)) & set(alive(new))) - set(newcomers)

    def task(rank: int, groups: Groups) -> Moved:
        group, expected = groups["all"], whole.shards(new, rank)
        arguments = whole.arguments(old, new, group, rank, holders)
        source, target = arguments["source"], arguments["target"]
        if not arguments["param_layouts"] and source:
            arguments["param_layouts"] = whole.layouts(old, rank)
        found = redistribute(**arguments, round_bytes=round_bytes)
        assert set(target) == set(expected)
        for name, x in expected.items():
            assert_equal(target[name], x)
        if source:
            for name, x in whole.shards(old, rank).items():
                assert_equal(source[name], x)
        assert found.bytes_received == found.bytes_least
        spy = group.collectives
        assert isinstance(spy, SpyCollectives)
        counts = spy.counts
        assert counts.get("all_to_all", 0) == found.rounds
        return found

    moved: dict[int, Moved] = on_living_ranks(new, task)
    assert sum(m.bytes_sent for m in moved.values()) == sum(
        m.bytes_received for m in moved.values()
    )
    return moved


def planned(topology: Topology, *down: Coord, **options: Any) -> NtpPlan:
    return plan(topology, Failures.at(*down), UNITS, **options)


@pytest.mark.parametrize("tp", [4, pytest.param(5, marks=pytest.mark.soak)])
def test_a_replica_shrinks_and_grows_back(tp: int) -> None:
    topology = Topology({"dp": 2, "tp": tp})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    shrunk = assert_resharded(full, less)
    # The replica that lost nothing gets nothing.
    assert all(shrunk[r].bytes_received == 0 for r in range(tp))
    assert sum(m.bytes_received for m in shrunk.values()) > 0
    grown = assert_resharded(less, full, newcomers=[tp + 2])
    assert all(m.bytes_sent == m.bytes_received == 0 for r, m in grown.items() if r < tp)


def test_it_shrinks_twice() -> None:
    topology = Topology({"dp": 2, "tp": 4})
    first = planned(topology, Coord(dp=1, tp=0))
    second = planned(topology, Coord(dp=1, tp=0), Coord(dp=1, tp=3))
    assert_resharded(first, second)


def test_two_replicas_are_damaged_at_once_and_a_newcomer_arrives() -> None:
    topology = Topology({"dp": 3, "tp": 4})
    old = planned(topology, Coord(dp=2, tp=1))
    new = planned(topology, Coord(dp=0, tp=1), Coord(dp=1, tp=3))
    assert_resharded(old, new, newcomers=[9])


def test_a_rank_is_replaced_before_the_next_plan() -> None:
    full = planned(Topology({"dp": 2, "tp": 3}))
    moved = assert_resharded(full, full, newcomers=[4])
    assert {r for r, m in moved.items() if m.bytes_received} == {4}


def test_nothing_is_sent_where_nothing_moves() -> None:
    full = planned(Topology({"dp": 2, "tp": 2}))
    moved = assert_resharded(full, full)
    assert all(m == Moved(0, 0, 0, 0) for m in moved.values())


def test_idle_and_slow_ranks_and_stages() -> None:
    topology = Topology({"pp": 2, "dp": 2, "cp": 1, "tp": 4})
    old = planned(topology)
    down = Coord(dp=0, pp=1, cp=0, tp=1)
    # One degree for both: idle ranks had state, or get it.
    nice = planned(topology, down, policy=Policy("nice"))
    assert_resharded(old, nice)
    slow = planned(topology, down, speeds={0: 0.5, 9: 0.7})
    assert_resharded(nice, slow)
    assert_resharded(slow, old, newcomers=sorted(set(alive(old)) - set(alive(slow))))


@pytest.mark.parametrize("seed", range(3))
def test_random_plans(seed: int) -> None:
    draw = random.Random(seed)
    axes = {"dp": draw.randint(2, 3), "cp": draw.choice([1, 2]), "tp": draw.choice([2, 3, 4])}
    topology = Topology(axes, draw.sample(sorted(axes), 3), offset=draw.choice([0, 3]))
    # A replica that never fails keeps everything.
    mortal = [
        r for r in topology.ranks if topology.coordinates(r)["dp"] and topology.coordinates(r)["tp"]
    ]
    plans = []
    for _ in range(2):
        failures = Failures.from_global_ranks(draw.sample(mortal, draw.randint(1, len(mortal))))
        plans.append(plan(topology, failures, UNITS))
    old, new = plans
    assert_resharded(old, new, round_bytes=draw.choice([300, 2000, 1 << 20]))


@pytest.mark.parametrize("round_bytes", [100, 4096])
def test_rounds_are_bounded(round_bytes: int) -> None:
    topology = Topology({"dp": 2, "tp": 3})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    moved = assert_resharded(full, less, round_bytes=round_bytes)
    most = max(max(m.bytes_sent, m.bytes_received) for m in moved.values())
    assert moved[0].rounds >= most / max(round_bytes, 24), "a position has at most 24 bytes"
    assert assert_resharded(full, less, round_bytes=1 << 20)[0].rounds == 1


def test_no_message_is_longer_than_a_round() -> None:
    topology = Topology({"dp": 2, "tp": 3})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    whole, holders = LogicalState.random(UNITS), set(alive(less))

    class Longest(SpyCollectives):
        longest = 0

        def run(self, call: Any) -> Tensor:
            if call.operation == "all_to_all":
                sizes = sum(call.sizes), sum(call.receive_sizes)
                self.longest = max(self.longest, *sizes)
            return super().run(call)

    def task(rank: int, groups: Groups) -> int:
        watched = Longest(groups["all"].collectives)
        group = groups["all"].with_collectives(watched)
        redistribute(**whole.arguments(full, less, group, rank, holders), round_bytes=200)
        return watched.longest

    assert 100 < max(on_living_ranks(less, task).values()) <= 200


def test_tensors_that_stay_are_not_copied() -> None:
    topology = Topology({"dp": 2, "tp": 3})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    whole, holders = LogicalState.random(UNITS), set(alive(less))

    def task(rank: int, groups: Groups) -> None:
        arguments = whole.arguments(full, less, groups["all"], rank, holders)
        source, target = arguments["source"], arguments["target"]
        if rank < 3:
            target.update(source)
            versions = {name: x._version for name, x in source.items()}
        redistribute(**arguments)
        for name, x in whole.shards(less, rank).items():
            assert_equal(target[name], x)
            if rank < 3:
                assert target[name] is source[name]
                assert source[name]._version == versions[name]

    on_living_ranks(less, task)
