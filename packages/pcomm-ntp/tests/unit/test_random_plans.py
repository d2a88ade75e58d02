"""Random plans against ownership that is counted here, unit by unit, from coordinates alone."""

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product
from math import gcd

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcomm.core import Topology
from pcomm.ntp import Failures, NtpPlan, Policy, Units, plan
from pcomm.ntp.planning.cuts import busiest, cuts, sizes


def draw_units(draw: random.Random, least: int) -> dict[str, Units]:
    """Few units of every kind, most of which no degree divides; names and patterns."""

    def count() -> int:
        return draw.randint(least, least + draw.choice([0, 1, 3, 20]))

    heads, block = count(), draw.randint(1, 3)
    made = {
        "*.qkv.weight": Units.gqa(q=heads * draw.randint(1, 3), kv=heads, dim=draw.randint(1, 2)),
        "*.out.weight": Units.columns(heads),
        "*.fc1.*": Units.gated(count() * block, block=block, work=draw.randint(0, 4)),
        "gdn.in": Units.fused(count(), sections=[draw.randint(1, 3) for _ in range(4)]),
        "embedding": Units.vocab(count()),
        "*.norm": Units.replicated(),
    }
    return {name: made[name] for name in draw.sample(sorted(made), draw.randint(2, len(made)))}


def draw_plan(draw: random.Random) -> tuple[NtpPlan, dict[int, Fraction]]:
    axes = {"pp": draw.choice([1, 1, 2]), "dp": draw.randint(1, 4), "cp": draw.choice([1, 1, 2])}
    axes["tp"] = draw.randint(1, 8)
    order = draw.sample(sorted(axes), 4)
    topology = Topology(axes, order, offset=draw.choice([0, 0, 3]))
    failed: list[int] = []
    for group in topology.groups("tp"):
        if draw.random() < 0.5:
            failed += draw.sample(group, draw.randint(0, len(group) - 1))
    speeds = {}
    if draw.random() < 0.5:
        for rank in draw.sample(topology.ranks, min(3, topology.world_size)):
            speeds[rank] = Fraction(draw.randint(1, 10), 10)
    policy = Policy(draw.choice(["max", "max", "nice"]))
    units = draw_units(draw, axes["tp"])
    made = plan(topology, Failures.from_global_ranks(failed), units, policy, speeds=speeds)
    return made, {rank: speed for rank, speed in speeds.items() if speed < 1}


def groups_of(made: NtpPlan, stage: int) -> Iterator[tuple[int, list[int]]]:
    """Replica and surviving ranks, ascending on tp, of each tensor-parallel group of a stage."""
    topology, axes = made.topology, made.topology.axes
    for replica, cp in product(range(axes["dp"]), range(axes["cp"])):
        places = ({"pp": stage, "dp": replica, "cp": cp, "tp": tp} for tp in range(axes["tp"]))
        ranks = [topology.rank(place) for place in places]
        yield replica, [rank for rank in ranks if rank not in topology.failed]


def held_units(made: NtpPlan, name: str, replica: int, stage: int) -> list[set[int]]:
    """Units of each rank of a group, from positions; every section must say the same."""
    units, layout = dict(made.units)[name], made.layout(name, replica, stage)
    held = []
    for index in range(layout.size):
        start, by_section = 0, []
        for width in units.sections:
            stop = start + units.count * width
            own = [p - start for p in layout.positions(index) if start <= p < stop]
            by_section.append({p // width for p in own})
            assert len(own) == len(by_section[-1]) * width, "a unit is cut"
            start = stop
        assert start == layout.length
        assert all(own == by_section[0] for own in by_section), "sections of a unit are apart"
        held.append(by_section[0])
    return held


def check(made: NtpPlan, speeds: dict[int, Fraction]) -> None:
    topology, axes = made.topology, made.topology.axes
    used: list[int] = []
    apart = NtpPlan.from_json(made.to_json())
    for stage in range(axes["pp"]):
        groups = [
            (replica, alive, made.tensor_ranks(alive[0]))
            for replica, alive in groups_of(made, stage)
        ]
        for replica, alive, own in groups:
            left = min(len(others) for one, others, _ in groups if one == replica)
            assert len(own) == made.degree(replica, stage) == len(made.form(replica, stage))
            assert len(own) == left or (made.policy.rounding == "nice" and len(own) < left)
            assert set(own) <= set(alive)
            # No rank that is left out is faster than one that is used.
            unused = [speeds.get(rank, Fraction(1)) for rank in alive if rank not in own]
            assert min(speeds.get(rank, Fraction(1)) for rank in own) >= max(unused, default=0)
            for rank in alive:
                place = made.place(rank)
                assert (place.replica, place.stage, place.degree) == (replica, stage, len(own))
                assert place.is_idle == (rank not in own)
                assert place.is_idle or own[place.index] == rank
            used += own
        for name, units in made.units:
            sums = made.groups(name, groups[0][1][0])
            views = [made.groups(name, rank) for _, alive, _ in groups for rank in alive]
            # Another process asks its own plan, as another rank.
            views.append(apart.groups(name, groups[-1][1][-1]))
            assert all(view == sums for view in views), "groups differ between ranks"
            if not units.is_split:
                assert [(g.start, g.stop) for g in sums] == [(0, 0)]
                assert list(sums[0].ranks) == sorted(rank for _, _, own in groups for rank in own)
                continue
            # The holders of each unit, in every group: exactly one, and these are summed.
            holders: list[list[int]] = [[] for _ in range(units.count)]
            for replica, _, own in groups:
                held = held_units(made, name, replica, stage)
                assert min(map(len, held)) >= 1
                for rank, mine in zip(own, held, strict=True):
                    for unit in mine:
                        holders[unit].append(rank)
            summed = [(unit, g.ranks) for g in sums for unit in range(g.start, g.stop)]
            assert [unit for unit, _ in summed] == list(range(units.count))
            for (_, ranks), expected in zip(summed, holders, strict=True):
                assert len(expected) == len(groups)
                assert list(ranks) == sorted(expected)
            # As few as possible: neighbours have other owners.
            assert all(a.ranks != b.ranks for a, b in pairwise(sums))
            forms = {made.form(replica, stage) for replica in range(axes["dp"])}
            assert len(made.segments(name, stage)) == len(sums)
            if all(speed == 1 for form in forms for speed in form):
                degrees = sorted(map(len, forms))
                bound = sum(degrees) - len(degrees) + 1
                if len(degrees) == 2:
                    bound = sum(degrees) - gcd(*degrees)
                assert len(sums) <= bound
    assert sorted([*used, *made.idle_ranks, *topology.failed]) == list(topology.ranks)


def check_texts(made: NtpPlan) -> None:
    again = NtpPlan.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    assert again.digest() == made.digest()
    replicas, cost = made.topology.axes["dp"], made.cost()
    assert cost.throughput == made.packing.speed_before / replicas
    assert all(0 < speed <= 1 for speed in made.speeds)
    assert sum(made.token_shares(8 * replicas, multiple=2)) == 8 * replicas
    named = re.findall(r"^dp=([\d,]+)(?: and (\d+) more)?: tp", made.explain(), re.MULTILINE)
    assert sum(len(some.split(",")) + int(more or 0) for some, more in named) == len(cost.replicas)


@pytest.mark.parametrize("number", [120, pytest.param(100_000, marks=pytest.mark.soak)])
def test_every_unit_of_random_plans_has_one_owner_in_each_group(number: int) -> None:
    seen: set[object] = set()
    for seed in range(number):
        made, speeds = draw_plan(random.Random(seed))
        try:
            check(made, speeds)
            check_texts(made)
        except Exception as error:
            error.add_note(f"seed {seed}: {made}")
            raise
        stages = range(made.topology.axes["pp"])
        forms = [{made.form(r, s) for r in range(made.topology.axes["dp"])} for s in stages]
        seen.add(max(map(len, forms)))
        seen |= {"weighted" for own in forms for form in own if min(form) < 1}
        seen |= {"idle"} if made.idle_ranks else set()
    assert seen >= {1, 2, 3, 4, "weighted", "idle"}


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_that_grows_back_is_as_it_was(seed: int) -> None:
    damaged, _ = draw_plan(random.Random(seed))
    topology = Topology(
        damaged.topology.axes, damaged.topology.order, offset=damaged.topology.offset
    )
    whole = plan(topology, Failures(), dict(damaged.units))
    back = plan(topology.with_failed(()), Failures(), dict(damaged.units))
    assert (back, hash(back), back.digest()) == (whole, hash(whole), whole.digest())
    assert not whole.idle_ranks
    for name, units in whole.units:
        if units.is_split:
            # Every element is tagged with its position, cut as before, joined, and cut again.
            before, between = whole.layout(name, 0), damaged.layout(name, 0)
            tags = [before.positions(rank) for rank in range(before.size)]
            tensor = [-1] * before.length
            for rank in range(between.size):
                for position in between.positions(rank):
                    assert tensor[position] == -1
                    tensor[position] = position
            assert [[tensor[p] for p in own] for own in tags] == tags


def splits(count: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of `ranks` at least one of `count` units."""
    if ranks == 1:
        yield (count,)
        return
    for first in range(1, count - ranks + 2):
        yield from ((first, *rest) for rest in splits(count - first, ranks - 1))


speeds = st.builds(Fraction, st.integers(1, 12), st.just(12))


@settings(max_examples=100, deadline=None)
@given(st.lists(speeds, min_size=1, max_size=4), st.integers(0, 8))
# The second rank's share ends behind what it can take in the least time.
@example([Fraction(1, 12), Fraction(1, 12), Fraction(4, 12)], 6)
def test_no_cut_lets_the_slowest_rank_be_done_sooner(rates: list[Fraction], more: int) -> None:
    count = len(rates) + more
    best = min(
        max(size / rate for size, rate in zip(way, rates, strict=True))
        for way in splits(count, len(rates))
    )
    own = sizes(count, rates)
    assert sum(own) == count
    assert min(own) >= 1
    if len(set(rates)) > 1:
        assert busiest(count, rates) == best
        assert max(size / rate for size, rate in zip(own, rates, strict=True)) == best


@settings(max_examples=50, deadline=None)
@given(st.lists(speeds, min_size=1, max_size=40), st.integers(0, 100_000))
def test_a_cut_depends_on_ratios_alone_and_follows_the_speeds(rates, more):
    count = len(rates) + more
    own = cuts(count, rates)
    assert own == cuts(count, [rate / 7 for rate in rates])
    assert cuts(count, [Fraction(1, 3)] * len(rates)) == cuts(count, len(rates))
    total = sum(rates)
    for size, rate in zip(sizes(count, rates), rates, strict=True):
        # Shares rounded up end less than the time of one unit on the slowest rank after the ideal
        # time, and no rank of the best cut ends later. That each rank has a unit at least plays no
        # part where each share is larger.
        if more > 12 * 40 * 12:
            assert size < count * rate / total + rate / min(rates)
