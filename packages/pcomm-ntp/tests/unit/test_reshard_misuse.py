"""Arguments that `redistribute` refuses, on all ranks and before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ntp_support.logical_state import LogicalState, alive, on_living_ranks, state_units
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

UNITS, TOPOLOGY = state_units(5), Topology({"dp": 2, "tp": 3})


def planned(topology: Topology, *down: Coord, **options: Any) -> NtpPlan:
    return plan(topology, Failures.at(*down), UNITS, **options)


def failures_of(change: Callable[[int, dict[str, Any]], None]) -> dict[int, Exception]:
    """What every rank raises if `change` spoils the arguments of some; nothing may be sent."""
    old, new = planned(TOPOLOGY), planned(TOPOLOGY, Coord(dp=1, tp=2))
    whole, holders = LogicalState.random(UNITS), set(alive(new))

    def task(rank: int, groups: Groups) -> Exception:
        arguments = whole.arguments(old, new, groups["all"], rank, holders)
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


NAME, LOST = "model.layers.0.fc1.weight", Coord(dp=1, tp=2)


def change_both(arguments: dict[str, Any], change: Callable[[dict[str, Tensor]], object]) -> None:
    change(arguments["source"])
    change(arguments["target"])


def cut_source(arguments: dict[str, Any]) -> None:
    arguments["source"][NAME] = arguments["source"][NAME][1:]


def in_fp64(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].double()


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["model.other"] = tensors.pop(NAME)


def cut_norm(arguments: dict[str, Any]) -> None:
    """A split parameter without units."""
    layouts = arguments["param_layouts"]
    layouts["layers.0.norm.weight"] = layouts["embedding"]


def of_the_gate_alone(arguments: dict[str, Any]) -> None:
    """A shard of the right size and other positions: without sections."""
    layouts = arguments["param_layouts"]
    sizes = layouts["layers.0.fc1.weight"].layout.sizes
    layouts["layers.0.fc1.weight"] = ParamLayout(Layout.uneven(sizes))


SLOW = {"old": planned(TOPOLOGY, LOST, speeds={0: 0.5})}
OTHER_JOB = {"new": plan(TOPOLOGY, Failures.at(LOST), {"w": Units.columns(8)})}
# Which rank is given wrong arguments (None for all), what is wrong with them, the error of that
# rank and of the others, and words of the latter.
MISUSES: list[tuple[Any, Any, Any, Any, list[str]]] = [
    (4, cut_source, LayoutError, PeerError, [NAME, "rank 4"]),
    (1, lambda a: change_both(a, in_fp64), *2 * [DivergenceError], ["[16, 3], bf", "float64"]),
    (1, lambda a: change_both(a, renamed), *2 * [DivergenceError], [NAME]),
    (0, lambda a: a["target"].pop(NAME), ConfigError, PeerError, []),
    (0, lambda a: a.update(source={}), ConfigError, PeerError, []),
    (3, lambda a: a.update(SLOW), *2 * [DivergenceError], []),
    (3, lambda a: a.update(holders={0, 1, 3, 4}), *2 * [DivergenceError], ["[0, 1, 3, 4]"]),
    (None, lambda a: a.update(OTHER_JOB), *2 * [ConfigError], ["units of two plans"]),
    (None, cut_norm, *2 * [ConfigError], ["norm"]),
    (0, of_the_gate_alone, LayoutError, PeerError, []),
    (None, lambda a: a.update(holders={0, 1, 2, 3, 4, 5}), *2 * [TopologyError], []),
]


@pytest.mark.parametrize(("wrong", "change", "own", "others", "words"), MISUSES)
def test_misuse_is_an_error_on_all_ranks(wrong, change, own, others, words):
    found = failures_of(lambda rank, args: change(args) if wrong in (None, rank) else None)
    for rank, error in found.items():
        assert isinstance(error, own if rank == wrong else others), error
        assert rank == wrong or all(word in str(error) for word in words), error


def test_lost_state_is_told_on_all_ranks_with_the_ranks_that_had_it() -> None:
    topology = Topology({"pp": 2, "dp": 2, "tp": 2})
    old = planned(topology)
    new = planned(topology, Coord(dp=0, pp=1, tp=1), Coord(dp=1, pp=1, tp=1))
    whole, holders = LogicalState.random(UNITS, stages=2), set(alive(new))
    gone = sorted(new.topology.failed)

    def task(rank: int, groups: Groups) -> None:
        # Stage 0 has lost nothing, and hears of it, too.
        with pytest.raises(StateLostError, match=rf"units .*\n?.*ranks \[{gone[0]}, {gone[1]}\]"):
            redistribute(**whole.arguments(old, new, groups["all"], rank, holders))

    on_living_ranks(new, task)
