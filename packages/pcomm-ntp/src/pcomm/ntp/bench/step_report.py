"""Times of steps as rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction

from pcomm.core.testing.timing import Row, Timing
from pcomm.ntp.bench.step import BY_HAND, SESSION, WHOLE, StepTimes

__all__ = ["OVER_SHARE", "step_rows"]

OVER_SHARE = "x the faster whole job's busiest rank, over the share of work"
"""Unit of the ratio that has a goal, 1.03."""


def step_rows(found: Mapping[str, Sequence[StepTimes]], share: Fraction, place: str) -> list[Row]:
    """Rows of one size: times beside the whole job, and bytes.

    Args:
        found: Times of each case by rank.
        share: Work of the busiest rank of the smaller job over that of the whole one.
        place: Words for the size.
    """
    used = {case: [one for one in ranks if one.wall_s] for case, ranks in found.items()}
    rows = []

    def add(
        case: str, value: float, unit: str, ratio: float | None = None, rounds: int = 1
    ) -> None:
        compared = "" if ratio is None else f"{WHOLE} @ {place}"
        rows.append(Row("ntp step", f"{case} @ {place}", value, unit, compared, ratio, rounds))

    busiest = {case: _busiest(case, ranks) for case, ranks in used.items()}
    for unit, timings in {
        "ms, wall": {case: _slowest(case, ranks) for case, ranks in used.items()},
        "ms of a core, busiest rank": busiest,
        "ms of cores, all ranks": {case: _together(case, ranks) for case, ranks in used.items()},
    }.items():
        for case, timing in timings.items():
            ratio = None if case == WHOLE else round(timing.ratio_to(timings[WHOLE]), 3)
            add(case, round(timing.median_us / 1e3, 2), unit, ratio, len(timing.rounds_us))
    baseline = min((busiest[case] for case in (BY_HAND, WHOLE)), key=lambda one: one.median_us)
    for case, timing in busiest.items():
        if case not in (BY_HAND, WHOLE, SESSION):
            over = round(timing.ratio_to(baseline) / float(share), 3)
            add(case, over, OVER_SHARE, rounds=len(timing.rounds_us))
    add("share of work", round(float(share), 3), "x the busiest rank's of the whole job")
    for case, ranks in used.items():
        if case == SESSION:  # its groups are its own
            continue
        sent = round(max(one.sent_bytes for one in ranks) / 2**20, 2)
        add(case, sent, "MiB sent in sums")
        add(case, max(one.calls for one in ranks), "sums a rank")
    return rows


def _slowest(case: str, ranks: Sequence[StepTimes]) -> Timing:
    return _timing(case, [max(one) for one in zip(*(r.wall_s for r in ranks), strict=True)])


def _busiest(case: str, ranks: Sequence[StepTimes]) -> Timing:
    """Of the rank with the most processor time over all rounds, so that noise is not picked."""
    busiest = max(ranks, key=lambda one: statistics.median(one.core_s))
    return _timing(case, busiest.core_s)


def _together(case: str, ranks: Sequence[StepTimes]) -> Timing:
    return _timing(case, [sum(one) for one in zip(*(r.core_s for r in ranks), strict=True)])


def _timing(case: str, seconds: Sequence[float]) -> Timing:
    return Timing(case, tuple(second * 1e6 for second in seconds))
