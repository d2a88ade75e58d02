"""Moves between random plans, against ownership that is counted unit by unit from layouts."""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from fractions import Fraction

import pytest

from pcomm.core import Topology
from pcomm.core.errors import ConfigError
from pcomm.ntp import Coord, Failures, NtpPlan, Policy, Units, plan
from pcomm.ntp.redistribute import StateLostError, moves
from pcomm.ntp.redistribute.planned_moves import level_senders

CASES = int(os.environ.get("PCOMM_RESHARD_CASES", "20"))
UNITS = {
    "*.qkv": Units.gqa(q=22, kv=11, dim=2),
    "*.fc1": Units.gated(26, block=2),
    "*.gdn": Units.fused(8, sections=(2, 1)),
    "embedding": Units.vocab(29),
    "*.norm": Units.replicated(),
}


def draw_plan(draw: random.Random, topology: Topology) -> NtpPlan:
    failed: list[int] = []
    for group in topology.groups("tp"):
        if draw.random() < 0.5:
            failed += draw.sample(group, draw.randint(0, len(group) - 1))
    slow = draw.sample(topology.ranks, min(2, topology.world_size)) if draw.random() < 0.3 else []
    speeds = {rank: Fraction(draw.randint(3, 10), 10) for rank in slow}
    policy = Policy(draw.choice(["max", "max", "nice"]))
    return plan(topology, Failures.from_global_ranks(failed), UNITS, policy, speeds=speeds)


def draw_pair(seed: int) -> tuple[NtpPlan, NtpPlan, set[int]]:
    """Two plans of one job, and the ranks that live through both and have state."""
    draw = random.Random(seed)
    axes = {"pp": draw.choice([1, 1, 2]), "dp": draw.randint(1, 4), "cp": draw.choice([1, 1, 2])}
    axes["tp"] = draw.randint(1, 8)
    topology = Topology(axes, draw.sample(sorted(axes), 4), offset=draw.choice([0, 0, 5]))
    old, new = draw_plan(draw, topology), draw_plan(draw, topology)
    holders = {r for r in topology.ranks if r not in old.topology.failed | new.topology.failed}
    # Some died and were replaced between the two plans, so they live under both without state.
    for rank in draw.sample(sorted(holders), min(len(holders), draw.choice([0, 0, 1, 2]))):
        holders.discard(rank)
    return old, new, holders


def held(made: NtpPlan, name: str, rank: int) -> set[int]:
    """Units of a rank, from the positions of the first section."""
    if rank in made.topology.failed or made.place(rank).is_idle:
        return set()
    place, known = made.place(rank), made.units_of(name)
    if known is None or not known[1].is_split:
        return {0}
    width, count = known[1].sections[0], known[1].count
    own = made.layout(name, place.replica, place.stage).positions(place.index)
    return {p // width for p in own if p < count * width}


def group_of(made: NtpPlan, rank: int) -> tuple[int, ...]:
    coordinates = made.topology.coordinates(rank)
    return tuple(n for axis, n in sorted(coordinates.items()) if axis != "tp")


def stage_of(made: NtpPlan, rank: int) -> int:
    return made.topology.coordinates(rank)["pp"]


@pytest.mark.parametrize("part", range(2))
def test_every_rank_gets_what_it_lacks_once_from_one_that_has_it(part: int) -> None:
    lost = moved = spread = 0
    for seed in range(part * CASES, (part + 1) * CASES):
        old, new, holders = draw_pair(seed)
        for name in ("0.qkv", "0.fc1", "0.gdn", "embedding", "0.norm", "0.unknown"):
            had = {r: held(old, name, r) if r in holders else set() for r in old.topology.ranks}
            wanted = {r: held(new, name, r) - had[r] for r in new.topology.ranks}
            owners: dict[tuple[int, int], list[int]] = defaultdict(list)
            for rank, units in had.items():
                for unit in units:
                    owners[stage_of(old, rank), unit].append(rank)
            if any(not owners[stage_of(new, r), u] for r, own in wanted.items() for u in own):
                with pytest.raises(StateLostError):
                    moves(old, new, name, holders=holders)
                lost += 1
                continue
            got: dict[int, list[int]] = defaultdict(list)
            far: list[tuple[int, int]] = []
            loads: Counter[int] = Counter()
            for source, target, start, stop in moves(old, new, name, holders=holders):
                units = set(range(start, stop))
                assert start < stop
                assert source != target
                assert units <= had[source]
                assert stage_of(old, source) == stage_of(old, target)
                got[target] += units
                loads[source] += len(units)
                if group_of(old, source) != group_of(old, target):
                    far += [(source, unit) for unit in sorted(units)]
                    near = [r for r in holders if group_of(old, r) == group_of(old, target)]
                    assert not any(units & had[r] for r in near), "a neighbour has it"
            for rank, units in wanted.items():
                assert sorted(got[rank]) == sorted(units)
            moved += len(got)
            # Nobody sends a unit from afar although another one that has it sends much less.
            for source, unit in far:
                others = [loads[r] for r in owners[stage_of(old, source), unit]]
                spread += len(others) > 1
                assert loads[source] <= min(others) + 1, (seed, name)
    assert lost, "no case without holders"
    assert moved > CASES
    assert spread > CASES / 10


def test_a_plan_that_follows_itself_moves_nothing() -> None:
    old, _, _ = draw_pair(3)
    alive = set(old.topology.ranks) - old.topology.failed
    for name in UNITS:
        assert moves(old, old, name, holders=alive) == ()


def test_growth_undoes_a_loss() -> None:
    topology = Topology({"dp": 2, "tp": 4})
    full = plan(topology, Failures(), UNITS)
    less = plan(topology, Failures.at(Coord(dp=1, tp=2)), UNITS)
    back = moves(less, full, "0.qkv", holders=set(range(8)) - {6})
    assert sum(m.stop - m.start for m in back if m.target == 6) == len(held(full, "0.qkv", 6))
    # All of it is near: each unit is still in the group that lost the rank.
    assert all(m.source >= 4 for m in back)
    assert all(m.target >= 4 for m in back)


def test_all_replicas_send_to_one_that_lost_a_rank() -> None:
    topology, units = Topology({"dp": 9, "tp": 2}), {"w": Units.columns(160)}
    old, new = (
        plan(topology, Failures(), units),
        plan(topology, Failures.at(Coord(dp=4, tp=1)), units),
    )
    found = moves(old, new, "w", holders=set(range(18)) - {9})
    assert {m.target for m in found} == {8}
    assert Counter({m.source: m.stop - m.start for m in found}) == dict.fromkeys(
        (1, 3, 5, 7, 11, 13, 15, 17), 10
    )


def test_replicated_parameters_reach_newcomers_alone_and_from_different_ranks() -> None:
    topology = Topology({"dp": 2, "tp": 4})
    less = plan(topology, Failures.at(Coord(dp=1, tp=2)), UNITS)
    full = plan(topology, Failures(), UNITS)
    senders = set()
    for layer in range(40):
        (one,) = moves(less, full, f"{layer}.norm", holders=set(range(8)) - {6})
        assert one.target == 6
        assert (one.start, one.stop) == (0, 1)
        senders.add(one.source)
    assert senders == {4, 5, 7}


def test_lost_state_is_named() -> None:
    topology = Topology({"dp": 2, "tp": 2})
    full = plan(topology, Failures(), {"w": Units.columns(8)})
    down = Failures.at(Coord(dp=0, tp=1), Coord(dp=1, tp=1))
    less = plan(topology, down, {"w": Units.columns(8)})
    with pytest.raises(StateLostError, match=r"'w', units 4 to 7: ranks \[1, 3\]"):
        moves(full, less, "w", holders={0, 2})


def test_plans_of_other_jobs_are_refused() -> None:
    old = plan(Topology({"dp": 2, "tp": 2}), Failures(), {"w": Units.columns(8)})
    with pytest.raises(ConfigError, match="axes"):
        moves(
            old,
            plan(Topology({"dp": 1, "tp": 4}), Failures(), {"w": Units.columns(8)}),
            "w",
            holders={0},
        )
    with pytest.raises(ConfigError, match="units"):
        moves(
            old,
            plan(Topology({"dp": 2, "tp": 2}), Failures(), {"w": Units.columns(9)}),
            "w",
            holders={0},
        )


def test_units_are_dealt_to_those_who_sent_least() -> None:
    draw = random.Random(5)
    for _ in range(300):
        ranks = list(range(draw.randint(1, 6)))
        loads = {rank: draw.randint(0, 9) for rank in ranks}
        before, count = dict(loads), draw.randint(1, 30)
        dealt = list(level_senders((7, 7 + count), ranks, loads))
        expected = dict(before)
        for _ in range(count):
            expected[min(ranks, key=lambda r: expected[r])] += 1
        assert sorted(loads.values()) == sorted(expected.values())
        assert [u for _, (a, b) in dealt for u in range(a, b)] == list(range(7, 7 + count))
        assert all(loads[r] - before[r] == b - a for r, (a, b) in dealt)
