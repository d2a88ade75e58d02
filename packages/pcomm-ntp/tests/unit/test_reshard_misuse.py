"""Arguments that `redistribute` refuses, on all ranks and before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ntp_support.logical_state import LogicalState, alive, on_living_ranks, state_units, unset
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
from pcomm.core.groups.open_groups import Groups
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp import Coord, Failures, NtpPlan, Units, plan
from pcomm.ntp.redistribute import StateLostError, redistribute

UNITS = state_units(5)


def planned(topology: Topology, *down: Coord, **options: Any) -> NtpPlan:
    return plan(topology, Failures.at(*down), UNITS, **options)


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
            redistribute(**arguments)
        spy = groups["all"].collectives
        assert isinstance(spy, SpyCollectives)
        assert "all_to_all" not in spy.counts
        for x in arguments["target"].values():
            assert torch.isnan(x).all() or arguments["source"] is arguments["target"]
        return caught.value

    found: dict[int, Exception] = on_living_ranks(new, task)
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
            redistribute(
                old,
                new,
                groups["all"],
                rank=rank,
                source=whole.shards(old, rank),
                target=unset(whole.shards(new, rank)),
                param_layouts=whole.layouts(new, rank),
                holders=holders,
            )

    on_living_ranks(new, task)
