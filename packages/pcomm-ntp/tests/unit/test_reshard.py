"""State that goes from plan to plan, between threads, against slices of a dense reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pcomm.core import Layout, Topology
from pcomm.core.collectives import SpyCollectives
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    LayoutError,
    PcommError,
    PeerError,
    TopologyError,
)
from pcomm.core.groups.groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.testing import assert_equal
from pcomm.ntp import Coord, Failures, Plan, Policy, Units, plan
from pcomm.ntp.reshard import Moved, StateLostError, reshard
from pcomm.ntp.testing.logical_state import LogicalState, state_units
from pcomm.ntp.testing.virtual_groups import run_on_virtual_groups

UNITS = state_units(5)


def alive(made: Plan) -> tuple[int, ...]:
    return tuple(r for r in made.topology.ranks if r not in made.topology.failed)


def on_ranks(made: Plan, task: Callable[[int, Groups], Any]) -> dict[int, Any]:
    spec = GroupSpec.of_ranks(alive(made), "all")
    return run_on_virtual_groups(made.topology, [spec], task)


def unset(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(x, float("nan")) for name, x in tensors.items()}


def check(
    old: Plan,
    new: Plan,
    *,
    newcomers: Collection[int] = (),
    state: LogicalState | None = None,
    round_bytes: int = 1 << 20,
) -> dict[int, Moved]:
    """Reshard, compare every tensor of every rank bit by bit, and bytes with what was lacking."""
    whole = state or LogicalState.random(UNITS, stages=old.topology.axes.get("pp", 1))
    holders = (set(alive(old)) & set(alive(new))) - set(newcomers)

    def task(rank: int, groups: Groups) -> Moved:
        source = whole.shards(old, rank) if rank in holders else {}
        expected = whole.shards(new, rank)
        target = unset(expected)
        layouts = whole.layouts(new, rank)
        if not layouts and source:
            layouts = whole.layouts(old, rank)
        group = groups["all"]
        found = reshard(
            old,
            new,
            group,
            rank=rank,
            source=source,
            target=target,
            param_layouts=layouts,
            holders=holders,
            round_bytes=round_bytes,
        )
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

    moved: dict[int, Moved] = on_ranks(new, task)
    assert sum(m.bytes_sent for m in moved.values()) == sum(
        m.bytes_received for m in moved.values()
    )
    return moved


def planned(topology: Topology, *down: Coord, **options: Any) -> Plan:
    return plan(topology, Failures.at(*down), UNITS, **options)


@pytest.mark.parametrize("tp", [4, 5])
def test_a_replica_shrinks_and_grows_back(tp: int) -> None:
    topology = Topology({"dp": 2, "tp": tp})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    shrunk = check(full, less)
    # The replica that lost nothing gets nothing.
    assert all(shrunk[r].bytes_received == 0 for r in range(tp))
    assert sum(m.bytes_received for m in shrunk.values()) > 0
    grown = check(less, full, newcomers=[tp + 2])
    assert all(m.bytes_sent == m.bytes_received == 0 for r, m in grown.items() if r < tp)


def test_it_shrinks_twice() -> None:
    topology = Topology({"dp": 2, "tp": 4})
    first = planned(topology, Coord(dp=1, tp=0))
    second = planned(topology, Coord(dp=1, tp=0), Coord(dp=1, tp=3))
    check(first, second)


def test_two_replicas_are_damaged_at_once_and_a_newcomer_arrives() -> None:
    topology = Topology({"dp": 3, "tp": 4})
    old = planned(topology, Coord(dp=2, tp=1))
    new = planned(topology, Coord(dp=0, tp=1), Coord(dp=1, tp=3))
    check(old, new, newcomers=[9])


def test_a_rank_is_replaced_before_the_next_plan() -> None:
    full = planned(Topology({"dp": 2, "tp": 3}))
    moved = check(full, full, newcomers=[4])
    assert {r for r, m in moved.items() if m.bytes_received} == {4}


def test_nothing_is_sent_where_nothing_moves() -> None:
    full = planned(Topology({"dp": 2, "tp": 2}))
    moved = check(full, full)
    assert all(m == Moved(0, 0, 0, 0) for m in moved.values())


def test_idle_and_slow_ranks_and_stages() -> None:
    topology = Topology({"pp": 2, "dp": 2, "cp": 1, "tp": 4})
    old = planned(topology)
    down = Coord(dp=0, pp=1, cp=0, tp=1)
    # One degree for both: idle ranks had state, or get it.
    nice = planned(topology, down, policy=Policy("nice"))
    check(old, nice)
    slow = planned(topology, down, speeds={0: 0.5, 9: 0.7})
    check(nice, slow)
    check(slow, old, newcomers=sorted(set(alive(old)) - set(alive(slow))))


@pytest.mark.parametrize("seed", range(4))
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
    check(old, new, round_bytes=draw.choice([300, 2000, 1 << 20]))


@pytest.mark.parametrize("round_bytes", [100, 4096])
def test_rounds_are_bounded(round_bytes: int) -> None:
    topology = Topology({"dp": 2, "tp": 3})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    moved = check(full, less, round_bytes=round_bytes)
    most = max(max(m.bytes_sent, m.bytes_received) for m in moved.values())
    assert moved[0].rounds >= most / max(round_bytes, 24), "a position has at most 24 bytes"
    assert check(full, less, round_bytes=1 << 20)[0].rounds == 1


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
        reshard(
            full,
            less,
            group,
            rank=rank,
            source=whole.shards(full, rank),
            target=unset(whole.shards(less, rank)),
            param_layouts=whole.layouts(less, rank),
            holders=holders,
            round_bytes=200,
        )
        return watched.longest

    assert 100 < max(on_ranks(less, task).values()) <= 200


def test_tensors_that_stay_are_not_copied() -> None:
    topology = Topology({"dp": 2, "tp": 3})
    full, less = planned(topology), planned(topology, Coord(dp=1, tp=2))
    whole, holders = LogicalState.random(UNITS), set(alive(less))

    def task(rank: int, groups: Groups) -> None:
        source, target = whole.shards(full, rank), unset(whole.shards(less, rank))
        if rank < 3:
            target = dict(source)
            versions = {name: x._version for name, x in source.items()}
        reshard(
            full,
            less,
            groups["all"],
            rank=rank,
            source=source,
            target=target,
            param_layouts=whole.layouts(less, rank),
            holders=holders,
        )
        for name, x in whole.shards(less, rank).items():
            assert_equal(target[name], x)
            if rank < 3:
                assert target[name] is source[name]
                assert source[name]._version == versions[name]

    on_ranks(less, task)


def failures_of(change: Callable[[int, dict[str, Any]], None]) -> dict[int, Exception]:
    """What every rank raises if `change` spoils the arguments of some; nothing may be sent."""
    topology = Topology({"dp": 2, "tp": 3})
    old, new = planned(topology), planned(topology, Coord(dp=1, tp=2))
    whole, holders = LogicalState.random(UNITS), set(alive(new))

    def task(rank: int, groups: Groups) -> Exception:
        arguments: dict[str, Any] = {
            "old": old,
            "new": new,
            "group": groups["all"],
            "rank": rank,
            "source": whole.shards(old, rank),
            "target": unset(whole.shards(new, rank)),
            "param_layouts": whole.layouts(new, rank),
            "holders": holders,
        }
        change(rank, arguments)
        with pytest.raises(PcommError) as caught:
            reshard(**arguments)
        spy = groups["all"].collectives
        assert isinstance(spy, SpyCollectives)
        assert "all_to_all" not in spy.counts
        for x in arguments["target"].values():
            assert torch.isnan(x).all() or arguments["source"] is arguments["target"]
        return caught.value

    found: dict[int, Exception] = on_ranks(new, task)
    return found


NAME = "model.layers.0.fc1.weight"


def test_a_tensor_of_another_shape() -> None:
    def change(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 4:
            arguments["source"][NAME] = arguments["source"][NAME][1:]

    found = failures_of(change)
    assert isinstance(found.pop(4), LayoutError)
    for error in found.values():
        assert isinstance(error, PeerError)
        assert NAME in str(error)
        assert "rank 4" in str(error)


def test_other_names_and_data_types_on_one_rank() -> None:
    def dtype(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 1:
            for side in ("source", "target"):
                arguments[side][NAME] = arguments[side][NAME].double()

    def name(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 1:
            for side in ("source", "target"):
                arguments[side]["model.other"] = arguments[side].pop(NAME)

    for error in failures_of(dtype).values():
        assert isinstance(error, DivergenceError)
        assert f"{NAME}: [16, 3], bfloat16" in str(error)
        assert "float64" in str(error)
    for error in failures_of(name).values():
        assert isinstance(error, DivergenceError)
        assert NAME in str(error)


def test_a_name_that_one_side_lacks_and_sides_that_are_missing() -> None:
    def lacking(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 0:
            del arguments["target"][NAME]

    def no_source(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 0:
            arguments["source"] = {}

    for change in (lacking, no_source):
        found = failures_of(change)
        assert isinstance(found.pop(0), ConfigError)
        assert all(isinstance(error, PeerError) for error in found.values())


def test_plans_and_holders_that_differ() -> None:
    other = planned(Topology({"dp": 2, "tp": 3}), Coord(dp=1, tp=2), speeds={0: 0.5})

    def plans(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 3:
            arguments["old"] = other

    def holders(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 3:
            arguments["holders"] = {0, 1, 3, 4}

    assert not any(isinstance(e, StateLostError) for e in failures_of(plans).values())
    for error in failures_of(holders).values():
        assert isinstance(error, DivergenceError)
        assert "[0, 1, 3, 4]" in str(error)


def test_plans_of_another_job() -> None:
    other = plan(
        Topology({"dp": 2, "tp": 3}), Failures.at(Coord(dp=1, tp=2)), {"w": Units.columns(8)}
    )

    def change(rank: int, arguments: dict[str, Any]) -> None:
        arguments["new"] = other

    for error in failures_of(change).values():
        assert isinstance(error, ConfigError)
        assert "units of two plans" in str(error)


def test_a_split_parameter_without_units() -> None:
    def change(rank: int, arguments: dict[str, Any]) -> None:
        layout = arguments["param_layouts"]["embedding"]
        assert isinstance(layout, ParamLayout)
        arguments["param_layouts"]["layers.0.norm.weight"] = layout

    for error in failures_of(change).values():
        assert isinstance(error, ConfigError)
        assert "model.layers.0.norm.weight" in str(error) or "norm" in str(error)


def test_a_shard_of_the_right_size_and_other_positions() -> None:
    def change(rank: int, arguments: dict[str, Any]) -> None:
        if rank == 0:
            own = arguments["param_layouts"]["layers.0.fc1.weight"]
            # Without sections: the rows of the gate alone.
            plain = Layout.uneven(own.layout.sizes)
            arguments["param_layouts"]["layers.0.fc1.weight"] = ParamLayout(plain)

    found = failures_of(change)
    assert isinstance(found.pop(0), LayoutError)
    assert all(isinstance(error, PeerError) for error in found.values())


def test_a_group_without_a_holder() -> None:
    def change(rank: int, arguments: dict[str, Any]) -> None:
        arguments["holders"] = {0, 1, 2, 3, 4, 5}

    assert all(isinstance(error, TopologyError) for error in failures_of(change).values())


def test_lost_state_is_told_on_all_ranks_with_the_ranks_that_had_it() -> None:
    topology = Topology({"pp": 2, "dp": 2, "tp": 2})
    old = planned(topology)
    new = planned(topology, Coord(dp=0, pp=1, tp=1), Coord(dp=1, pp=1, tp=1))
    whole, holders = LogicalState.random(UNITS, stages=2), set(alive(new))
    gone = sorted(new.topology.failed)

    def task(rank: int, groups: Groups) -> None:
        # Stage 0 has lost nothing, and hears of it, too.
        with pytest.raises(StateLostError, match=rf"units .*\n?.*ranks \[{gone[0]}, {gone[1]}\]"):
            reshard(
                old,
                new,
                groups["all"],
                rank=rank,
                source=whole.shards(old, rank),
                target=unset(whole.shards(new, rank)),
                param_layouts=whole.layouts(new, rank),
                holders=holders,
            )

    on_ranks(new, task)
