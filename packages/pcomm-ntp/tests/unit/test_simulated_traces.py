"""Predictions over days of failures and repairs, against loops, queues and figures of others."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate import SCHEMES, FailureRates, Fleet, simulate_trace
from pcomm.ntp.simulate.failure_rates import draw_outages
from pcomm.ntp.simulate.granularity import degree_speeds
from pcomm.ntp.simulate.schemes import throughputs

LONG = FailureRates(hardware_repair_h=(120.0,))


@pytest.mark.parametrize(("days", "num_states"), [(2, range(20, 512)), (20, range(513, 4000))])
def test_a_trace_equals_a_sum_over_its_intervals(days, num_states):
    fleet = Fleet(96, tp=4, domains_per_replica=3)
    rates = FailureRates(gpu_hours_per_failure=60.0, hardware_share=0.1, blast_radius=2)
    hours = days * 24
    found = draw_outages(fleet, rates, hours, seed=5)
    outages = list(zip(found.gpu.tolist(), found.start_h.tolist(), found.end_h.tolist()))  # noqa: B905
    moments = sorted({0.0, *(t for _, *span in outages for t in span if t < hours)})
    assert len(moments) in num_states
    counts = np.zeros((len(moments), fleet.num_domains), dtype=np.int64)
    for gpu, start, end in outages:
        for index, moment in enumerate(moments):
            counts[index, gpu // 4] += start <= moment < end
    weights = np.diff([*moments, hours]) / hours
    for result in simulate_trace(fleet, rates, days=days, seed=5, pause_s=10, spare_domains=2):
        scheme = next(s for s in SCHEMES if s.name == result.scheme)
        speeds = degree_speeds(4)
        through = throughputs(counts, fleet, scheme, speeds, spare_domains=2)
        shapes = [tuple(row if scheme.shrinks else row > 0) for row in counts]
        changes = sum(a != b for a, b in zip(shapes[1:], shapes, strict=False))
        paused = changes * 10 / (days * 86_400)
        ideal = ((96 + 8 - counts.sum(axis=1)) / 96) @ weights
        assert result.reconfigurations_per_day == pytest.approx(changes / days)
        assert result.paused_share == pytest.approx(paused)
        assert result.goodput == pytest.approx(through @ weights * (1 - paused))
        assert result.ratio == pytest.approx(result.goodput / ideal)
        assert result.least_throughput == pytest.approx(through.min())
        assert result.peak_failed == counts.sum(axis=1).max()
        assert result.above_share == pytest.approx(weights[counts.sum(axis=1) > 0].sum())


def test_outages_of_one_gpu_do_not_overlap():
    found = draw_outages(Fleet(8, 4), FailureRates(gpu_hours_per_failure=100.0), 2000, seed=2)
    same = found.gpu[1:] == found.gpu[:-1]
    assert 8 < len(found.gpu) < found.failures
    assert (found.start_h[1:] > found.end_h[:-1])[same].all()
    assert (found.end_h > found.start_h).all()


def test_a_blast_takes_its_block_out_at_once():
    rates = FailureRates(blast_radius=18, hardware_share=1.0)
    found = draw_outages(Fleet(7_200, 72), rates, 240, seed=1)
    blocks = {}
    for gpu, start in zip(found.gpu.tolist(), found.start_h.tolist(), strict=True):
        blocks.setdefault(start, set()).add(gpu)
    # A block that fails again while it is out stays out.
    assert 10 < len(blocks) <= found.failures
    for gpus in blocks.values():
        assert gpus == set(range(min(gpus), min(gpus) + 18))
        assert min(gpus) % 18 == 0


def test_gpus_that_are_out_follow_the_queue_without_waiting():
    # Outages of a Poisson process, from an empty start: the mean number at time t is the rate
    # times the integral of the share of repairs longer than u, over u up to t (M/G/inf).
    fleet, hours, rounds = Fleet(10_000, 1), 20 * 24, 8
    rates = FailureRates(gpu_hours_per_failure=12_000)
    per_hour = 10_000 / rates.gpu_hours_per_failure
    kinds = [(0.22, 3.0), (0.39, 72.0), (0.39, 120.0)]
    mean = sum(per_hour * p * (s * hours - s * s / 2) for p, s in kinds) / hours
    lost = [1 - simulate_trace(fleet, rates, ["exact in place"], days=20, seed=seed)[0].goodput
            for seed in range(rounds)]  # fmt: skip
    # A failure costs at most 120 h of one GPU: so much is the spread of the sum of a Poisson
    # number of them. At most mean / 10,000 of all failures hit a GPU that is out already.
    spread = math.sqrt(per_hour * hours) * 120 / hours / math.sqrt(rounds)
    assert abs(np.mean(lost) * 10_000 - mean) <= 4 * spread + mean * mean / 10_000
    assert 4 * spread < 0.2 * mean


def test_without_groups_all_is_ideal():
    fleet = Fleet(5_000, 1)
    for result in simulate_trace(fleet, schemes=[s for s in SCHEMES if s.local_batch is None]):
        assert result.ratio == pytest.approx(1.0)


def test_published_shares_are_found_again():
    fleet, rounds = Fleet(32_768, 32, 8), 10
    per_day = 32_768 * 24 / LONG.gpu_hours_per_failure
    # The 33rd GPU is out after as many hardware failures, with the software failures of 3 h.
    reached = (33 - per_day * 0.22 / 8) / (per_day * 0.78)
    results = [simulate_trace(fleet, LONG, ["drop packed", "paper", "exact"], seed=seed)
               for seed in range(rounds)]  # fmt: skip
    above = np.mean([drop.above_share for drop, _, _ in results])
    # The time of the 33rd event has a relative spread of 1 / sqrt(33).
    error = 4 * reached / 15 / math.sqrt(33) / math.sqrt(rounds)
    assert abs(above - (1 - reached / 15)) <= error < 0.05
    assert abs(above - 0.81) <= error
    for drop, paper, exact in results:
        # Two replicas of eight domains make up for the published scheme's losses; spares for
        # dropping are as many as domains are damaged at once.
        assert paper.spares_without_loss <= 16
        assert exact.spares_without_loss == 8
        assert 50 <= drop.spares_without_loss <= drop.peak_failed
        assert 0.995 <= exact.ratio <= 1
        assert drop.goodput < paper.goodput < exact.goodput


@pytest.mark.parametrize(("factor", "published"), [(1, 0.94), (3, 0.80)])
def test_published_availability_is_found_again(factor, published):
    rates = FailureRates(gpu_hours_per_failure=FailureRates().gpu_hours_per_failure / factor)
    fleet = Fleet(32_768, 64)
    seeds = range(6)
    found = [simulate_trace(fleet, rates, ["drop packed"], seed=seed)[0] for seed in seeds]
    # The published figures come from other traces of the same rates: two points are allowed, a
    # tenth of what the threefold rate costs.
    assert np.mean([trace.goodput for trace in found]) == pytest.approx(published, abs=0.02)


def test_bursts_multiply_the_failures_inside_them():
    fleet, hours = Fleet(10_000, 8), 2_000.0
    rates = replace(FailureRates(), bursts_per_day=2.0, burst_hours=6.0)
    quiet = hours * 10_000 / rates.gpu_hours_per_failure
    # Poisson bursts cover 1 - exp(-rate * length) of the time, each factor taken once.
    expected = quiet * (1 + 6 * (1 - math.exp(-2 / 24 * 6)))
    seeds = range(8)
    mean = np.mean([draw_outages(fleet, rates, hours, seed).failures for seed in seeds])
    # The covered time has the spread of about 167 bursts of 6 h, at most.
    covered = 6 * quiet * math.sqrt(2 / 24 * hours) * 6 / hours
    assert abs(mean - expected) <= 4 * math.sqrt((expected + covered**2) / len(seeds))
    plain = np.mean([draw_outages(fleet, FailureRates(), hours, seed).failures for seed in seeds])
    assert abs(plain - quiet) <= 4 * math.sqrt(quiet / len(seeds))
    assert mean > 2 * plain


def test_spares_help_and_pauses_cost():
    fleet = Fleet(9_216, 72, 2)
    plain = simulate_trace(fleet, seed=3)
    spared = simulate_trace(fleet, seed=3, spare_domains=plain[1].spares_without_loss)
    paused = simulate_trace(fleet, seed=3, pause_s=60)
    for a, b, c in zip(plain, spared, paused, strict=True):
        assert b.goodput == pytest.approx(1.0)
        assert a.goodput < b.goodput
        assert c.goodput == pytest.approx(a.goodput * (1 - c.paused_share))
        assert 0 < c.paused_share < 0.02
    # All of the time is the most that pauses can take.
    assert {r.goodput for r in simulate_trace(fleet, seed=3, pause_s=1e6)} == {0.0}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: FailureRates(hardware_share=1.2), "hardware_share"),
        (lambda: FailureRates(hardware_repair_h=()), "hardware_repair_h"),
        (lambda: FailureRates(burst_factor=0.5), "burst_factor"),
        (lambda: FailureRates(blast_radius=0), "blast_radius: 0"),
        (lambda: simulate_trace(Fleet(8, 8), days=0), "days=0"),
        (lambda: simulate_trace(Fleet(8, 8), days=math.inf), "days=inf"),
        (lambda: simulate_trace(Fleet(8, 8), pause_s=-1), "pause_s=-1"),
        (lambda: simulate_trace(Fleet(8, 8), pause_s=math.nan), "pause_s=nan"),
        (lambda: simulate_trace(Fleet(8, 8), spare_domains=-1), "spare_domains=-1"),
    ],
)
def test_numbers_that_cannot_be_are_told(call, told):
    with pytest.raises(ConfigError, match=told):
        call()
