"""Predictions over random places, against closed forms, enumeration and figures of others."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate import SCHEMES, Fleet, Scheme, UnitWork, simulate
from pcomm.ntp.simulate.granularity import degree_speeds, granularity
from pcomm.ntp.simulate.placements import draw_counts
from pcomm.ntp.simulate.schemes import throughputs

# Means of 60 placements by another program, rounded to three decimals: drop, drop packed, paper,
# exact, exact sorted.
TABLE = [
    ((32_768, 8, 32), 0.001, (0.770, 0.986, 0.999, 0.999, 0.999)),
    ((32_768, 8, 32), 0.004, (0.361, 0.967, 0.995, 0.998, 0.999)),
    ((32_768, 32, 8), 0.001, (0.773, 0.964, 0.996, 1.000, 1.000)),
    ((32_768, 32, 8), 0.004, (0.363, 0.880, 0.989, 0.998, 1.000)),
    ((32_768, 64, 4), 0.004, (0.363, 0.775, 0.975, 0.999, 1.000)),
    ((9_216, 72, 2), 0.004, (0.563, 0.748, 0.972, 0.999, 1.000)),
    ((100_800, 72, 8), 0.001, (0.563, 0.928, 0.992, 1.000, 1.000)),
    ((100_800, 72, 8), 0.004, (0.103, 0.750, 0.972, 0.998, 1.000)),
]
NAMES = [scheme.name for scheme in SCHEMES]


def slowly(row: list[int], fleet: Fleet, scheme: Scheme, spare_domains: int = 0) -> Fraction:
    """The throughput of one placement, told in loops and whole numbers."""
    row = list(row)
    for _ in range(spare_domains):
        row[row.index(max(row))] = 0
    if scheme.packing != "in_place":
        damaged = [k for k in row if k]
        if scheme.packing == "by_damage":
            damaged.sort(reverse=True)
        row = damaged + [0] * (len(row) - len(damaged))
    total = Fraction()
    for first in range(0, len(row), fleet.domains_per_replica):
        worst = max(row[first : first + fleet.domains_per_replica])
        if worst and scheme.one_degree:
            worst = max(row)
        left = fleet.tp - worst
        if worst == 0:
            total += 1
        elif scheme.shrinks and scheme.local_batch is None:
            total += Fraction(left, fleet.tp)
        elif scheme.shrinks:
            total += Fraction(scheme.local_batch * left // fleet.tp, scheme.local_batch)
    return total / fleet.num_replicas


@pytest.mark.parametrize(("sizes", "share", "expected"), TABLE)
def test_the_table_of_another_simulation_is_found_again(sizes, share, expected):
    names = [name for name in NAMES if name != "exact in place"]
    rows = simulate(Fleet(*sizes), share, names, placements=240, seed=1)
    for row, other in zip(rows, expected, strict=True):
        # Both are means, of 240 and of 60 placements with the same spread: 4 standard errors of
        # their difference, and half of the last decimal.
        error = 4 * row.spread * math.sqrt(1 / 240 + 1 / 60) + 0.0005
        assert abs(row.ratio - other) <= error, row


def test_published_losses_are_found_again():
    # TP32, 0.4 % failed: up to 12 % where replicas are dropped, at most 3 % where they shrink.
    drop, paper = simulate(Fleet(32_768, 32, 8), 0.004, ["drop packed", "paper"])
    assert 1 - drop.throughput == pytest.approx(0.12, abs=0.005)
    assert 1 - paper.throughput <= 0.03


@pytest.mark.parametrize(("tp", "printed"), [(8, 0.992), (16, 0.984), (32, 0.968), (64, 0.9375)])
def test_domains_that_are_left_follow_the_closed_form(tp, printed):
    fleet = Fleet(32_768, tp)
    (row,) = simulate(fleet, 0.001, ["drop packed"], placements=400)
    assert row.failed == 33
    # A domain is whole if all 33 failed GPUs are among the others.
    whole = math.comb(32_768 - tp, 33) / math.comb(32_768, 33)
    assert abs(row.throughput - whole) <= 5 * row.spread / math.sqrt(400)
    assert whole == pytest.approx(printed, abs=5.1e-4)


@pytest.mark.parametrize("radius", [1, 2, 3])
@pytest.mark.parametrize("failed", [1, 3])
def test_small_fleets_have_the_mean_over_all_placements(radius, failed):
    fleet = Fleet(12, tp=3, domains_per_replica=2)
    ratios = {scheme.name: [] for scheme in SCHEMES}
    for drawn in itertools.combinations(range(12), failed):
        hit = {g for d in drawn for g in range(12) if g // radius == d // radius}
        row = [len(hit & set(range(d, d + 3))) for d in range(0, 12, 3)]
        for scheme in SCHEMES:
            found = slowly(row, fleet, scheme)
            ratios[scheme.name].append(float(found * 12 / (12 - len(hit))))
    for row in simulate(fleet, failed, blast_radius=radius, placements=1500):
        mean = np.mean(ratios[row.scheme])
        # Five standard errors of the mean of 1500, and rounding where all placements are alike.
        assert abs(row.ratio - mean) <= 5 * np.std(ratios[row.scheme]) / 1500**0.5 + 1e-12
        assert row.least >= min(ratios[row.scheme]) - 1e-12
        assert row.spread == pytest.approx(np.std(ratios[row.scheme]), rel=0.15, abs=1e-12)


@st.composite
def damage(draw):
    tp, size, replicas = (draw(st.integers(1, n)) for n in (9, 4, 4))
    fleet = Fleet(tp * size * replicas, tp, size)
    count = st.integers(0, tp) | st.just(0)
    rows = draw(st.lists(st.lists(count, min_size=size * replicas, max_size=size * replicas),
                         min_size=1, max_size=3))  # fmt: skip
    return fleet, rows


@given(damage(), st.integers(0, 3), st.sampled_from([None, 1, 3, 8]))
@settings(max_examples=150, deadline=None)
def test_schemes_equal_loops(case, spares, batch):
    fleet, rows = case
    spares = min(spares, fleet.num_domains)
    for scheme in SCHEMES:
        scheme = replace(scheme, local_batch=batch)
        found = throughputs(
            np.array(rows), fleet, scheme, degree_speeds(fleet.tp), spare_domains=spares
        )
        expected = [float(slowly(row, fleet, scheme, spares)) for row in rows]
        assert found == pytest.approx(expected, abs=1e-12)


@given(damage(), st.data())
@settings(max_examples=150, deadline=None)
def test_schemes_are_ordered_and_more_failures_never_help(case, data):
    fleet, rows = case
    units = data.draw(st.sampled_from([(), (UnitWork(8, 0.3),), (UnitWork(5, 1.0),)]))
    speeds = degree_speeds(fleet.tp, units)
    counts = np.array(rows[:1])
    more = counts.copy()
    more[0, data.draw(st.integers(0, fleet.num_domains - 1))] = fleet.tp
    spares = data.draw(st.integers(0, fleet.num_domains))

    def of(name, counts, spares=0):
        scheme = next(s for s in SCHEMES if s.name == name)
        return throughputs(counts, fleet, scheme, speeds, spare_domains=spares)[0]

    for name in NAMES:
        # Where damage stays in place, one more failure may draw a spare to a replica that it makes
        # whole; packing by number may pair other domains.
        if name != "exact":
            used = 0 if name in ("drop", "exact in place") else spares
            assert of(name, more, used) <= of(name, counts, used) + 1e-12
            assert of(name, counts) <= of(name, counts, spares) + 1e-12
        if not units:
            assert of(name, counts) <= 1 - counts.sum() / fleet.num_gpus + 1e-12
    ranked = [
        ("drop", "drop packed"),
        ("drop packed", "paper"),
        ("paper", "exact"),
        ("exact", "exact sorted"),
        ("drop", "exact in place"),
        ("exact in place", "exact sorted"),
    ]
    for worse, better in ranked:
        assert of(worse, counts) <= of(better, counts) + 1e-12


def test_packing_by_number_can_gain_from_one_more_failure():
    # A fifth damaged domain moves the others: (1, 2), (2, 1) become (1, 1), (2, 2), (1, 0), which
    # lose as much. With a sixth one, (1, 2), (2, 1), (1, 0) lose 5, and (1, 1), (2, 2), (1, 1) 4.
    fleet, exact = Fleet(32, tp=4, domains_per_replica=2), SCHEMES[NAMES.index("exact")]
    speeds = degree_speeds(4)
    before, after = [[0, 1, 2, 2, 1, 0, 0, 0]], [[1, 1, 2, 2, 1, 0, 0, 0]]
    assert throughputs(np.array(before), fleet, exact, speeds) == [1 - (2 + 2) / 16]
    assert throughputs(np.array(after), fleet, exact, speeds) == [1 - (1 + 2 + 1) / 16]
    before, after = [[0, 1, 2, 2, 1, 1, 0, 0]], [[1, 1, 2, 2, 1, 1, 0, 0]]
    assert throughputs(np.array(before), fleet, exact, speeds) == [1 - (2 + 2 + 1) / 16]
    assert throughputs(np.array(after), fleet, exact, speeds) == [1 - (1 + 2 + 1) / 16]


@pytest.mark.parametrize(
    ("heads", "degree", "efficiency"),
    [(32, 3, 0.970), (32, 71, 0.451), (64, 28, 0.762), (96, 6, 1.0), (128, 30, 0.853)],
)
def test_granularity_has_the_known_cliffs(heads, degree, efficiency):
    assert float(granularity(heads, degree)) == pytest.approx(efficiency, abs=5.1e-4)


def test_units_slow_a_reduced_degree_by_their_share():
    assert degree_speeds(8) == [Fraction(8 - k, 8) for k in range(9)]
    alone = degree_speeds(32, [UnitWork(128, 1.0)])
    assert alone[2] == Fraction(30, 32) * granularity(128, 30) == Fraction(4, 5)
    third = degree_speeds(32, [UnitWork(128, 1 / 3)])
    # A third of the work has loads of 5 where 128 / 30 is the mean.
    assert float(third[2]) == pytest.approx(1 / (2 / 3 * 32 / 30 + 1 / 3 * 5 / 4), rel=1e-8)
    fleet = Fleet(32_768, 32, 8)
    plain, cut = (simulate(fleet, 0.004, units=u) for u in ([], [UnitWork(128, 1 / 3)]))
    for without, with_units in zip(plain, cut, strict=True):
        assert with_units.ratio <= without.ratio
    assert cut[-1].ratio < plain[-1].ratio


def test_shares_of_all_the_work_may_be_rounded():
    # Work in multiplications: the nearest shares add up to 1 + 3e-17.
    works = [979_374_294_953, 428_791_346_099, 667_578_651_271]
    shares = [UnitWork(8, float(Fraction(work, sum(works)))) for work in works]
    found = degree_speeds(8, shares)
    assert [float(speed) for speed in found] == pytest.approx(
        [1, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 4, 1 / 8, 0]
    )


def test_a_seed_decides_the_places():
    fleet = Fleet(960, 8, 4)
    assert (draw_counts(fleet, 20, seed=3) == draw_counts(fleet, 20, seed=3)).all()
    assert (draw_counts(fleet, 20, seed=3) != draw_counts(fleet, 20, seed=4)).any()
    assert (draw_counts(fleet, 20).sum(axis=1) == 20).all()
    assert simulate(fleet, 20, seed=3) == simulate(fleet, 20, seed=3)


@pytest.mark.parametrize("radius", [1, 4, 7, 960, 5000])
def test_a_blast_takes_aligned_blocks(radius):
    counts = draw_counts(Fleet(960, 8), 1, blast_radius=radius, placements=20)
    sizes = {min(radius, 960 - first) for first in range(0, 960, radius)}
    assert set(counts.sum(axis=1).tolist()) <= sizes
    if radius == 4:
        assert set(counts.max(axis=1).tolist()) == {4}


def test_nothing_and_everything_may_fail():
    fleet = Fleet(24, 4, 2)
    assert {row.ratio for row in simulate(fleet, 0)} == {1.0}
    assert {row.throughput for row in simulate(fleet, 24)} == {0.0}
    assert {row.throughput for row in simulate(fleet, 24, spare_domains=6)} == {1.0}
    assert [row.spread for row in simulate(fleet, 3, ["drop"], placements=1)] == [0.0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Fleet(100, 8), "num_gpus=96 or 104"),
        (lambda: Fleet(5, 8), r"Use num_gpus=8\."),
        (lambda: Fleet(0, 8), "num_gpus: 0"),
        (lambda: simulate(Fleet(8, 8), 9), "from 0 to 8"),
        (lambda: simulate(Fleet(8, 8), 5.0), "or an integer from 0 to 8"),
        (lambda: simulate(Fleet(8, 8), math.nan), "a share from 0 to 1"),
        (lambda: simulate(Fleet(8, 8), 1, ["dropp"]), "Did you mean 'drop'"),
        (lambda: simulate(Fleet(8, 8), 1, placements=0), "placements: 0"),
        (lambda: simulate(Fleet(8, 8), 1, blast_radius=0), "blast_radius: 0"),
        (lambda: simulate(Fleet(8, 8), 1, spare_domains=-1), "spare_domains=-1"),
        (lambda: simulate(Fleet(8, 8), 1, units=[UnitWork(4, 0.7)] * 2), "1.4 together"),
        (lambda: UnitWork(0, 0.5), "num_units: 0"),
        (lambda: UnitWork(4, 1.5), "share=1.5"),
        (lambda: replace(SCHEMES[0], local_batch=0), "local_batch: 0"),
    ],
)
def test_numbers_that_cannot_be_are_told(call, told):
    with pytest.raises(ConfigError, match=told):
        call()


def test_a_row_is_the_mean_and_spread_of_its_placements():
    fleet = Fleet(96, 8, 2)
    hit = draw_counts(fleet, 5, blast_radius=3, placements=4, seed=7).sum(axis=1)
    options = {"blast_radius": 3, "placements": 4, "seed": 7}
    # With all domains replaced, throughput is that of the job, and spares count as GPUs.
    (row,) = simulate(fleet, 5, ["drop"], spare_domains=12, **options)
    ratios = 96 / (96 + 12 * 8 - hit)
    assert len(set(hit.tolist())) > 1
    assert (row.throughput, row.failed, row.placements) == (1.0, hit.mean(), 4)
    assert row.ratio == pytest.approx(ratios.mean())
    assert row.spread == pytest.approx(math.sqrt(((ratios - ratios.mean()) ** 2).sum() / 3))
    assert row.least == pytest.approx(ratios.min())
