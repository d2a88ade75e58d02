"""A job over days of failures and repairs, event by event, for one scheme after another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate.failure_rates import FailureRates, Outages, draw_outages
from pcomm.ntp.simulate.fleet import Fleet
from pcomm.ntp.simulate.granularity import UnitWork, degree_speeds
from pcomm.ntp.simulate.placements import check_spares
from pcomm.ntp.simulate.schemes import SCHEMES, Counts, Scheme, scheme_of, throughputs

__all__ = ["SimulatedTrace", "simulate_trace"]

_STATES_AT_ONCE = 512


@dataclass(frozen=True)
class SimulatedTrace:
    """The prediction for one scheme over one trace; no figure in it is measured.

    Args:
        fleet: GPUs of the job.
        scheme: Name of the policy.
        days: Length of the trace.
        failures: Number of failures in it.
        goodput: Mean throughput over time, pauses included, relative to the job without a failure.
        ratio: Goodput over the ideal, the mean share of GPUs that are not failed. Spare domains
            count as GPUs of the ideal.
        least_throughput: Smallest throughput between pauses.
        reconfigurations_per_day: Mean number of times a day at which the job changes its shape,
            since a GPU has failed or is back.
        paused_share: Share of the time in which nothing is trained.
        above_share: Share of the time in which more than 0.1 % of the GPUs are failed.
        peak_failed: Largest number of GPUs that are failed at once.
        spares_without_loss: Number of spare domains with which the global batch never shrinks: one
            for each damaged domain where replicas are dropped; whole replicas that make up for
            what the reduced ones lack where they shrink.
    """

    fleet: Fleet
    scheme: str
    days: float
    failures: int
    goodput: float
    ratio: float
    least_throughput: float
    reconfigurations_per_day: float
    paused_share: float
    above_share: float
    peak_failed: int
    spares_without_loss: int


def simulate_trace(
    fleet: Fleet,
    rates: FailureRates = FailureRates(),  # noqa: B008
    schemes: Iterable[str | Scheme] = SCHEMES,
    *,
    days: float = 15.0,
    pause_s: float = 0.0,
    units: Sequence[UnitWork] = (),
    spare_domains: int = 0,
    seed: int = 0,
) -> list[SimulatedTrace]:
    """Predict the goodput of a job whose GPUs fail and return, for each scheme on one trace.

    Args:
        fleet: GPUs of the job; all are in order at the start.
        rates: Rates of failures and repairs.
        schemes: Policies, or names of those in `SCHEMES`.
        days: Length of the trace.
        pause_s: Time in seconds in which nothing is trained each time that the job changes its
            shape, with the work that is repeated. Pauses that would overlap are added up.
        units: Work that is split by whole units, such as 128 attention heads.
        spare_domains: Number of domains beside the job that replace its most damaged ones;
            they do not fail. Where damage stays in place, another choice may gain more.
        seed: Number that decides times and places.

    Returns:
        A result for each scheme, in the given order. Local.

    Raises:
        ConfigError: Numbers that do not fit together, or an unknown scheme.
    """
    if not (0 < days < math.inf and 0 <= pause_s < math.inf):
        raise ConfigError(
            f"simulate_trace: days={days}, pause_s={pause_s}",
            found="a time out of range",
            why="A trace has a length, and a pause is no gain.",
            fix="Use days above 0 and pause_s from 0, both finite.",
        )
    check_spares(spare_domains)
    known = [scheme_of(scheme) for scheme in schemes]
    outages = draw_outages(fleet, rates, days * 24, seed)
    return [
        _replay(fleet, scheme, outages, days, pause_s, units, spare_domains) for scheme in known
    ]


def _replay(
    fleet: Fleet,
    scheme: Scheme,
    outages: Outages,
    days: float,
    pause_s: float,
    units: Sequence[UnitWork],
    spare_domains: int,
) -> SimulatedTrace:
    speeds = degree_speeds(fleet.tp, units)
    goodput = ideal = above = 0.0
    least, peak, spares, changes = 1.0, 0, 0, 0
    last = np.zeros((1, fleet.num_domains), dtype=np.int64)
    all_gpus = fleet.num_gpus + spare_domains * fleet.tp
    for counts, weight in _states(fleet, outages, days * 24):
        found = throughputs(counts, fleet, scheme, speeds, spare_domains=spare_domains)
        failed = counts.sum(axis=1)
        goodput += float(found @ weight)
        ideal += float((all_gpus - failed) @ weight) / fleet.num_gpus
        above += float(weight[failed > 0.001 * fleet.num_gpus].sum())
        least, peak = min(least, float(found.min())), max(peak, int(failed.max()))
        spares = max(spares, _spares_without_loss(counts, fleet, scheme, speeds))
        shape = np.concatenate([last, counts])
        if not scheme.shrinks:
            shape = shape > 0
        changes += int((shape[1:] != shape[:-1]).any(axis=1).sum())
        last = counts[-1:]
    paused = min(1.0, changes * pause_s / (days * 86_400))
    goodput *= 1 - paused
    return SimulatedTrace(
        fleet=fleet,
        scheme=scheme.name,
        days=days,
        failures=outages.failures,
        goodput=goodput,
        ratio=goodput / ideal if ideal else 1.0,
        least_throughput=least,
        reconfigurations_per_day=changes / days,
        paused_share=paused,
        above_share=above,
        peak_failed=peak,
        spares_without_loss=spares,
    )


def _states(
    fleet: Fleet, outages: Outages, hours: float
) -> Iterator[tuple[Counts, NDArray[np.float64]]]:
    """Failed GPUs by domain between two events, with each state's share of the time."""
    time = np.concatenate([[0.0], outages.start_h, outages.end_h])
    domain = np.concatenate([[0], outages.gpu // fleet.tp, outages.gpu // fleet.tp])
    step = np.concatenate([[0], np.ones_like(outages.gpu), -np.ones_like(outages.gpu)])
    inside = time < hours
    # GPUs that fail or return at one moment are one event.
    moments, event = np.unique(time[inside], return_inverse=True)
    order = np.argsort(event, kind="stable")
    event, domain, step = event[order], domain[inside][order], step[inside][order]
    weights = np.diff(np.append(moments, hours)) / hours
    now = np.zeros(fleet.num_domains, dtype=np.int64)
    for begin in range(0, len(moments), _STATES_AT_ONCE):
        end = min(begin + _STATES_AT_ONCE, len(moments))
        rows = slice(*np.searchsorted(event, [begin, end]))
        counts = np.zeros((end - begin, fleet.num_domains), dtype=np.int64)
        np.add.at(counts, (event[rows] - begin, domain[rows]), step[rows])
        counts = now + np.cumsum(counts, axis=0)
        now = counts[-1]
        yield counts, weights[begin:end]


def _spares_without_loss(
    counts: Counts, fleet: Fleet, scheme: Scheme, speeds: Sequence[Fraction]
) -> int:
    if not scheme.shrinks:
        return int((counts > 0).sum(axis=1).max())
    found = throughputs(counts, fleet, scheme, speeds)
    # Rounded before it is cut, since a sum of floats may lie an ulp above a whole number.
    lacking = round(float((1 - found).max()) * fleet.num_replicas, 9)
    return math.ceil(lacking) * fleet.domains_per_replica
