import json
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest

from pcomm.core import Topology
from pcomm.core.errors import ConfigError, LayoutError, PcommError, TopologyError
from pcomm.ntp import Coord, Failures, NtpPlan, Place, Policy, Units, grad_groups, plan
from pcomm.ntp.planning.cuts import least_time_shares

TOPOLOGY = Topology({"pp": 2, "dp": 4, "cp": 1, "tp": 8})
UNITS = {
    "qkv": Units.gqa(q=32, kv=8, dim=4),
    "fc1": Units.gated(88),
    "fc2": Units.columns(88),
    "emb": Units.vocab(101),
    "norm": Units.replicated(),
}


def test_nice_uses_the_fewest_ranks_that_are_as_fast() -> None:
    topology = Topology({"dp": 2, "tp": 32})
    units = {"attention": Units.columns(128)}
    made = plan(topology, Failures.parse("dp=1,tp=0", "dp=1,tp=1"), units, Policy("nice"))
    assert made.degrees == ((32,), (26,))
    assert len(made.idle_ranks) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_that_is_dropped_leaves_the_plan_of_the_others(seed: int) -> None:
    draw = random.Random(seed)
    axes = {"dp": draw.randint(2, 4), "cp": draw.choice([1, 2]), "tp": 8}
    size, policy = axes["cp"] * axes["tp"], Policy(draw.choice(["max", "nice"]), 0, 0, True)
    others = Topology({**axes, "dp": axes["dp"] - 1})
    lost = [r for r in others.ranks if draw.random() < 0.2]
    speeds = {r: Fraction(draw.randint(1, 9), 10) for r in draw.sample(others.ranks, 2)}
    expected = plan(others, Failures.from_global_ranks(lost), UNITS, policy, speeds=speeds)
    # The last replica loses a tensor-parallel group, and perhaps others; ranks of it may be left.
    first = others.world_size
    lost += range(first, first + draw.choice([axes["tp"], size]))
    found = plan(Topology(axes), Failures.from_global_ranks(lost), UNITS, policy, speeds=speeds)
    assert found.degrees == (*expected.degrees, (0,))
    assert found.speeds == (*expected.speeds, 0)
    assert found.token_shares(100) == (*expected.token_shares(100), 0)
    assert found.canonical_replica() == expected.canonical_replica()
    left = set(range(first, first + size)).difference(lost)
    assert found.idle_ranks == (*expected.idle_ranks, *sorted(left))
    assert all(found.place(rank).is_idle for rank in left)
    for name in UNITS:
        rank = expected._tensor_groups(0)[0][1][0]
        assert found.groups(name, rank) == expected.groups(name, rank)
    assert [grad.ranks for grad in grad_groups(found)] == [g.ranks for g in grad_groups(expected)]
    assert NtpPlan.from_json(found.to_json()) == found
    assert f"dp={axes['dp'] - 1}: tp 0, speed 0.000" in found.explain()


def test_errors_name_the_remedy() -> None:
    with pytest.raises(TopologyError, match=r"Did you mean .*'dp'"):
        plan(TOPOLOGY, Failures.at(Coord(dpp=1, pp=0, tp=0)), UNITS)
    with pytest.raises(TopologyError, match="all 8 ranks have failed"):
        plan(TOPOLOGY, Failures.from_global_ranks(range(8)), UNITS)
    every = Failures.from_global_ranks(range(TOPOLOGY.world_size))
    with pytest.raises(TopologyError, match="all 8 ranks have failed"):
        plan(TOPOLOGY, every, UNITS, Policy(drops_replicas=True))
    with pytest.raises(LayoutError, match="Use tp=4 or less"):
        plan(TOPOLOGY, Failures(), {"qkv": Units.gqa(q=8, kv=4, dim=2)})
    one_lost = Failures.from_global_ranks([0])
    with pytest.raises(LayoutError, match="or plan without replica dp=0"):
        plan(TOPOLOGY, one_lost, UNITS, Policy("max", 100, 110))
    # A job that does not fit when it is whole is not told to leave a replica out.
    with pytest.raises(LayoutError, match="split the model over more ranks"):
        plan(TOPOLOGY, one_lost, UNITS, Policy("max", 120, 110))
    with pytest.raises(ConfigError, match="Write it like"):
        Coord.parse("dp:3")
    text = json.loads(plan(TOPOLOGY, Failures(), UNITS).to_json()) | {"failed": [3]}
    with pytest.raises(ConfigError, match="digest"):
        NtpPlan.from_json(json.dumps(text))


def test_packing_reaches_the_speed_that_it_names() -> None:
    draw, gained = random.Random(3), 0
    for _ in range(60):
        topology = Topology({"pp": 2, "dp": 4, "cp": 2, "tp": 8})
        down = draw.sample(range(topology.world_size), draw.randint(2, 7))
        slow = draw.sample(sorted(set(topology.ranks) - set(down)), draw.choice([0, 0, 4]))
        speeds = {rank: draw.choice([0.5, 0.8]) for rank in slow}
        made = plan(topology, Failures.from_global_ranks(down), UNITS, speeds=speeds)
        # A swap moves the ranks of two groups, so each gets the coordinates of another.
        places = [topology.coordinates(rank) for rank in (*down, *slow)]
        for swap in made.packing.swaps:
            ends = dict(swap.one), dict(swap.other)
            for place in places:
                group = {axis: n for axis, n in place.items() if axis != "tp"}
                if group in ends:
                    place.update(ends[1 - ends.index(group)])
        ranks = [topology.rank(place) for place in places]
        moved = dict(zip(ranks[len(down) :], speeds.values(), strict=True))
        failed = Failures.from_global_ranks(ranks[: len(down)])
        packed = plan(topology, failed, UNITS, speeds=moved)
        assert packed.cost().throughput * 4 == made.packing.speed_after
        assert packed.cost().throughput >= made.cost().throughput
        gained += bool(made.packing.swaps)
    assert gained > 20


def test_units_are_found_by_name_then_by_pattern() -> None:
    attention, other = Units.columns(64), Units.columns(32)
    units = {"*.proj.weight": attention, "b.*": attention, "a.proj.weight": other, "*x": other}
    made = plan(TOPOLOGY, Failures(), units)
    assert made.units_of("a.proj.weight") == ("a.proj.weight", other)
    assert made.units_of("c.proj.weight") == ("*.proj.weight", attention)
    assert made.units_of("b.proj.weight") == ("*.proj.weight", attention)
    assert made.units_of("C.PROJ.WEIGHT") is None
    assert made.layout("c.proj.weight", 0) == attention.layout(8)
    with pytest.raises(ConfigError, match="Narrow one of the patterns"):
        made.units_of("b.x")


@pytest.mark.parametrize(("replica", "stage"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_place_that_is_not_there_is_refused(replica: int, stage: int) -> None:
    made = plan(TOPOLOGY, Failures.from_global_ranks([0]), UNITS)
    asked: list[Callable[[], object]] = [
        lambda: made.degree(replica, stage),
        lambda: made.form(replica, stage),
        lambda: made.layout("fc1", replica, stage),
    ]
    if stage:
        asked.append(lambda: made.segments("fc1", stage))
    for ask in asked:
        with pytest.raises(TopologyError, match="a replica from 0 to 3 and a stage from 0 to 1"):
            ask()


def test_a_replicated_parameter_has_no_units() -> None:
    # Groups are kept by the number of units, and 0 is that of all replicated parameters.
    with pytest.raises(ConfigError, match=r"Units\.replicated\(\)"):
        Units("replicated", 8, ())


def test_any_word_may_be_an_axis() -> None:
    topology = Topology({"dp": 1, "self": 2, "tp": 2})
    failures = Failures.parse("self=1,tp=0")
    assert failures.ranks(topology) == {2}
    assert Failures.from_json(failures.to_json()) == failures
    with pytest.raises(TopologyError, match="'self' in Coord"):
        Failures.parse("self=1").ranks(TOPOLOGY)


def test_places_count_the_ranks_that_are_used() -> None:
    topology = Topology({"dp": 2, "tp": 32})
    units = {"attention": Units.columns(128)}
    made = plan(topology, Failures.from_global_ranks([32, 33]), units, Policy("nice"))
    places = {rank: made.place(rank) for rank in topology.ranks if rank not in (32, 33)}
    assert sorted(r for r, p in places.items() if p.is_idle) == list(made.idle_ranks)
    assert [places[r].index for r in range(34, 60)] == list(range(26))
    assert places[5] == Place(replica=0, stage=0, index=5, degree=32, is_idle=False)
    assert made.form(1) == (1,) * 26
    assert made.canonical_replica() == 0
    with pytest.raises(TopologyError, match="rank 33 has failed"):
        made.place(33)
    both = plan(topology, Failures.from_global_ranks([0, 1, 33]), units)
    assert both.canonical_replica() == 1


def test_a_slow_rank_gets_fewer_units_and_its_replica_is_slower() -> None:
    topology = Topology({"dp": 3, "tp": 4})
    units = {"fc": Units.columns(70), "norm": Units.replicated()}
    made = plan(topology, Failures.from_global_ranks([11]), units, speeds={5: 0.5, 11: 0.5})
    half = Fraction(1, 2)
    assert made.degrees == ((4,), (4,), (3,))
    assert made.rank_speeds == ((5, half),)
    assert made.form(1) == (1, half, 1, 1)
    assert made.layout("fc", 1).sizes == (20, 10, 20, 20)
    assert made.layout("fc", 0).sizes == (17, 18, 17, 18)
    assert made.speeds == (1, Fraction(18, 20), Fraction(18, 24))
    # A rank of half the speed counts for half a rank.
    assert made.cost().ratio_to_ideal == Fraction(53, 60) * 12 / Fraction(21, 2)
    (slow, reduced) = made.cost().replicas
    assert (slow.replica, slow.degrees, slow.forms) == (1, (4,), ((1, half, 1, 1),))
    assert (slow.efficiency, slow.memory_growth, slow.idle) == (1, Fraction(20, 18), 0)
    assert reduced.forms == ((1, 1, 1),)
    assert "rank 5 (dp=1,tp=1): speed 0.500, fc 10 of 70 units" in made.explain()
    assert made.canonical_replica() == 0
    assert [s.owner(made.form(1)) for s in made.segments("fc") if s.start == 20] == [1]
    again = NtpPlan.from_json(made.to_json())
    assert (again, again.digest()) == (made, made.digest())
    without = plan(topology, Failures.from_global_ranks([11]), units)
    assert without.digest() != made.digest()
    assert [line for line in made.agreed_lines() if line not in without.agreed_lines()] == [
        "speed of rank 5: 1/2"
    ]


def test_replicas_of_equal_outcome_share_a_line() -> None:
    topology, units = Topology({"dp": 16, "tp": 4}), {"fc": Units.columns(12)}
    words = [f"dp={replica},tp={replica % 4}" for replica in range(10)]
    text = plan(topology, Failures.parse(*words[:8], "dp=9,tp=0", "dp=9,tp=3"), units).explain()
    assert [line.split(",", 8)[:8] for line in text.splitlines() if line.startswith("dp=0")] == [
        ["dp=0", "1", "2", "3", "4", "5", "6", "7: tp 3"]
    ]
    assert "\ndp=9: tp 2, speed 0.5" in text
    text = plan(topology, Failures.parse(*words), units).explain()
    assert "\ndp=0,1,2,3,4,5,6,7 and 2 more: tp 3, speed 0.75" in text
    assert text.count("\ndp=") == 1


def test_it_names_the_segments_of_the_stage_that_has_most() -> None:
    topology, units = Topology({"pp": 2, "dp": 2, "tp": 4}), {"fc": Units.columns(12)}
    made = plan(topology, Failures.parse("pp=1,dp=0,tp=2"), units)
    assert [len(made.segments("fc", stage)) for stage in (0, 1)] == [4, 6]
    assert "\nfc: columns, 12 units, 6 segments" in made.explain()


@pytest.mark.parametrize("number", [8, 9])
def test_swaps_and_slow_ranks_are_named_up_to_a_number(number: int) -> None:
    topology = Topology({"pp": 2, "dp": 2 * number, "tp": 4})
    words = [f"dp={replica},pp=0,tp=0" for replica in range(2 * number)]
    made = plan(topology, Failures.parse(*words), {"fc": Units.columns(12)})
    # Of each two damaged groups one stays where it is.
    assert len(made.packing.swaps) == number
    text = made.explain()
    assert text.count(" <-> ") == 8
    assert ("\nmore swaps: 1" in text) == (number == 9)
    slow = dict.fromkeys(range(1, 4 * number, 4), 0.5)
    text = plan(topology, Failures(), {"fc": Units.columns(12)}, speeds=slow).explain()
    assert text.count(": speed 0.500, fc ") == 8
    assert ("\nmore slow ranks: 1" in text) == (number == 9)


def test_a_group_of_equally_slow_ranks_is_cut_like_any_other() -> None:
    topology = Topology({"dp": 2, "tp": 4})
    made = plan(topology, Failures(), UNITS, speeds=dict.fromkeys(range(4), 0.25))
    assert made.form(0) == made.form(1) == (1, 1, 1, 1)
    assert len(made.segments("fc1")) == 4
    assert made.speeds == (Fraction(1, 4), 1)
    assert made.canonical_replica() == 1


def test_slow_ranks_are_the_first_that_are_left_out() -> None:
    # The group at cp=1 has 3 ranks left, so that at cp=0 uses 3 of its 4.
    topology = Topology({"dp": 1, "cp": 2, "tp": 4})
    down = Failures.parse("dp=0,cp=1,tp=0")
    made = plan(topology, down, {"fc": Units.columns(12)}, speeds={1: 0.5, 7: 0.75})
    assert made.tensor_ranks(0) == (0, 2, 3)
    assert made.idle_ranks == (1,)
    assert "rank 1 (cp=0,dp=0,tp=1): speed 0.500, idle" in made.explain()
    # Both groups hold the same units, so the slower of two ranks at a place counts.
    assert made.form(0) == (1, 1, Fraction(3, 4))
    # With a unit each, a rank this slow would hold up seven others.
    eight = Topology({"dp": 1, "tp": 8})
    units = {"heads": Units.columns(56)}
    nice = plan(eight, Failures(), units, Policy("nice"), speeds={2: 0.1})
    assert nice.idle_ranks == (2,)
    assert nice.speeds[0] == Fraction(7, 8)
    both = plan(eight, Failures(), units, Policy("nice"), speeds={2: 0.1, 5: 0.9})
    assert both.idle_ranks == (2,)
    most = plan(eight, Failures(), units, speeds={2: 0.1})
    assert most.layout("heads", 0).sizes == (7, 8, 1, 8, 8, 8, 8, 8)
    assert most.speeds[0] == Fraction(7, 10)


@pytest.mark.parametrize(
    "speed", [0, -1, 1.5, float("nan"), float("inf"), Fraction(5, 4), Fraction(10**400)]
)
def test_a_speed_that_no_rank_has_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        plan(TOPOLOGY, Failures(), UNITS, speeds={3: speed})


def test_speeds_are_exact_and_of_ranks_that_are_there() -> None:
    made = plan(TOPOLOGY, Failures(), UNITS, speeds={3: 0.3, 4: 1, 5: 1.0, 6: Fraction(1, 3)})
    assert made.rank_speeds == ((3, Fraction(3, 10)), (6, Fraction(1, 3)))
    with pytest.raises(TopologyError, match="Use a rank of this topology"):
        plan(TOPOLOGY, Failures(), UNITS, speeds={64: 0.5})
    # Slow ranks make others hold more, which the limit on memory sees.
    with pytest.raises(LayoutError, match="Raise memory_limit"):
        plan(TOPOLOGY, Failures(), UNITS, Policy("max", 100, 110), speeds={0: 0.1})


def test_each_kind_of_units_takes_its_own_share_of_the_memory() -> None:
    """Of 8 key heads a rank of 7 has two, and of 11,008 columns an eighth more than before."""
    topology, one_lost = Topology({"dp": 2, "tp": 8}), Failures.from_global_ranks([8])
    units = {"qkv": Units.gqa(q=32, kv=8, dim=128), "fc": Units.gated(11008)}
    # Attention is a fifth, and twice as much; a rank has at most 1,573 of the columns, not 1,376.
    expected = 200 * 2 + Fraction(800 * 1573, 1376)
    for limit in (1314, 1315):
        assert expected > 1314
        policy = Policy("max", {"fc": 800, "qkv": 200}, limit)
        if limit < expected:
            with pytest.raises(LayoutError, match="1315 bytes on a rank, 1314 allowed"):
                plan(topology, one_lost, units, policy)
            continue
        made = plan(topology, one_lost, units, policy)
        assert made.degrees == ((8,), (7,))
        assert "memory up to x1.315" in made.explain()
        again = NtpPlan.from_json(made.to_json())
        assert (again, hash(again), again.digest()) == (made, hash(made), made.digest())
    # One number counts as what grows most.
    with pytest.raises(LayoutError, match="2000 bytes on a rank, 1999 allowed"):
        plan(topology, one_lost, units, Policy("max", 1000, 1999))
    assert "memory up to x2.000" in plan(topology, one_lost, units).explain()
    for wrong in ({"fc": 800}, {"fc": 800, "qkv": 200, "norm": 0}):
        with pytest.raises(ConfigError, match="rank_bytes"):
            plan(topology, one_lost, units, Policy("max", wrong, 2000))
    for wrong in ({"fc": -1, "qkv": 2}, {"fc": 1.5}, {"fc": 0}):
        with pytest.raises(ConfigError, match="memory_limit"):
            Policy("max", wrong, 2000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 1),
        ("speeds", {"3": "fast"}),
        ("speeds", {"3": "1/0"}),
        ("units", {"fc": {"kind": "columns", "count": 88.5, "sections": [1], "work": 1}}),
        ("speeds", {"x": "1/2"}),
        ("speeds", [3]),
        ("units", {"fc": {"kind": "columns"}}),
        ("units", 3),
        ("axes", {"pp": 2, "dp": 4, "cp": 1, "tp": 8.0}),
        ("offset", 0.0),
        ("failed", [3.0]),
        ("failed", [float("nan")]),
        ("speeds", {"3": "1/2"}),
        ("axes", {"pp": 1, "dp": 10**400, "cp": 1, "tp": 8}),
    ],
)
def test_text_of_another_plan_is_refused(key: str, value: object) -> None:
    text = json.loads(plan(TOPOLOGY, Failures(), UNITS).to_json()) | {key: value}
    with pytest.raises(PcommError, match=r"Write it again by Plan\.to_json|than 4194304 ranks"):
        NtpPlan.from_json(json.dumps(text))


def test_text_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="RecursionError"):
        NtpPlan.from_json("[" * 100_000)


def test_a_job_of_too_many_ranks_is_refused_before_anything_is_counted(monkeypatch):
    monkeypatch.setattr("pcomm.ntp.planning.degrees._MOST_RANKS", 64)
    plan(Topology({"dp": 8, "tp": 8}), Failures(), UNITS)
    with pytest.raises(TopologyError, match="more than 64 ranks"):
        plan(Topology({"dp": 9, "tp": 8}), Failures(), UNITS)


def test_shares_of_few_sequences_take_the_least_time() -> None:
    draw = random.Random(5)
    for _ in range(60):
        speeds = [Fraction(draw.randint(1, 12), 12) for _ in range(draw.randint(1, 4))]
        total = draw.randint(len(speeds), 11)
        found = least_time_shares(total, speeds)
        every = product(range(1, total + 1), repeat=len(speeds))
        least = min(
            max(n / speed for n, speed in zip(own, speeds, strict=True))
            for own in every
            if sum(own) == total
        )
        assert sum(found) == total
        assert min(found) >= 1
        assert max(n / speed for n, speed in zip(found, speeds, strict=True)) == least
    # Proportional, and rounded to the nearest, would be 2 and 8.
    assert least_time_shares(10, [Fraction(1, 5), Fraction(1)]) == (1, 9)
    assert least_time_shares(3, [Fraction(1), Fraction(0), Fraction(1)]) == (2, 0, 1)
