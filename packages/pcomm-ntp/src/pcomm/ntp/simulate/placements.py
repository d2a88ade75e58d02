"""Monte-Carlo over the places of a given number of failed GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate.fleet import Fleet, positive
from pcomm.ntp.simulate.granularity import UnitWork, degree_speeds
from pcomm.ntp.simulate.schemes import SCHEMES, Counts, Scheme, scheme_of, throughputs

__all__ = ["SimulatedRow", "check_spares", "draw_counts", "simulate"]


@dataclass(frozen=True)
class SimulatedRow:
    """The prediction for one scheme; no figure in it is measured.

    Args:
        fleet: GPUs of the job.
        scheme: Name of the policy.
        failed: Mean number of failed GPUs, over placements; with a blast radius more than drawn.
        throughput: Mean throughput, relative to the job without a failure.
        ratio: Mean of the throughput over the ideal, the share of GPUs that are left. Spare
            domains count as GPUs of the ideal.
        spread: Standard deviation of that ratio over placements, 0 for a single one.
        least: The smallest ratio of a placement.
        placements: Number of placements.
    """

    fleet: Fleet
    scheme: str
    failed: float
    throughput: float
    ratio: float
    spread: float
    least: float
    placements: int


def draw_counts(
    fleet: Fleet, failed: int, *, blast_radius: int = 1, placements: int = 60, seed: int = 0
) -> Counts:
    """Failed GPUs by domain, for places drawn uniformly without repetition.

    Args:
        fleet: GPUs of the job.
        failed: Number of GPUs that are drawn.
        blast_radius: Number of neighbouring GPUs that fail together: each drawn GPU takes its
            aligned block of this size with it.
        placements: Number of independent draws.
        seed: Number that decides the places.

    Returns:
        Integers of shape [placements, domains].

    Raises:
        ConfigError: More failed GPUs than there are, or a count below its least value.
    """
    positive("draw_counts: blast_radius", blast_radius)
    positive("draw_counts: placements", placements)
    if not 0 <= failed <= fleet.num_gpus:
        raise ConfigError(
            f"draw_counts: failed={failed}",
            found=f"{fleet}",
            why="Only GPUs of the job can fail, each once.",
            fix=f"Use a number from 0 to {fleet.num_gpus}.",
        )
    random = np.random.default_rng(seed)
    counts = np.zeros((placements, fleet.num_domains), dtype=np.int64)
    block = np.arange(blast_radius)
    for row in counts:
        drawn = random.choice(fleet.num_gpus, failed, replace=False, shuffle=False)
        first = np.unique(drawn // blast_radius) * blast_radius
        gpus = (first[:, None] + block).ravel()
        row += np.bincount(gpus[gpus < fleet.num_gpus] // fleet.tp, minlength=fleet.num_domains)
    return counts


def simulate(
    fleet: Fleet,
    failed: int | float,
    schemes: Iterable[str | Scheme] = SCHEMES,
    *,
    blast_radius: int = 1,
    units: Sequence[UnitWork] = (),
    spare_domains: int = 0,
    placements: int = 60,
    seed: int = 0,
) -> list[SimulatedRow]:
    """Predict the throughput that failed GPUs leave, for each scheme on the same placements.

    Scaling inside a domain is perfect but for `units`: with `k` of `T` GPUs lost it runs at
    `(T - k) / T`. Time for communication, and for the recovery itself, is not part of it
    (`simulate_trace` has the latter). With `units` a ratio may exceed 1: where the full degree does
    not divide the units, all throughputs are relative to a job that is uneven itself. Local.

    Args:
        fleet: GPUs of the job.
        failed: Number of GPUs that are drawn (an integer), or their share of all (a float in
            0 to 1), which is rounded to a whole number.
        schemes: Policies, or names of those in `SCHEMES`.
        blast_radius: Number of neighbouring GPUs that fail together.
        units: Work that is split by whole units, such as 128 attention heads. Empty for work
            that any degree splits evenly.
        spare_domains: Number of domains beside the job that replace its most damaged ones;
            they do not fail. Where damage stays in place, another choice may gain more.
        placements: Number of independent draws.
        seed: Number that decides the places.

    Returns:
        A row for each scheme, in the given order.

    Raises:
        ConfigError: Numbers that do not fit together, or an unknown scheme.
    """
    if isinstance(failed, float):
        if not 0 <= failed <= 1:
            raise ConfigError(
                f"simulate: failed={failed}",
                found="a float outside of 0 to 1",
                why="A float is the share of GPUs that have failed, an integer their number.",
                fix=f"Use a share from 0 to 1, or an integer from 0 to {fleet.num_gpus}.",
            )
        failed = round(failed * fleet.num_gpus)
    check_spares(spare_domains)
    known = [scheme_of(scheme) for scheme in schemes]
    speeds = degree_speeds(fleet.tp, units)
    counts = draw_counts(fleet, failed, blast_radius=blast_radius, placements=placements, seed=seed)
    hit = counts.sum(axis=1)
    left = fleet.num_gpus + spare_domains * fleet.tp - hit
    rows = []
    for scheme in known:
        found = throughputs(counts, fleet, scheme, speeds, spare_domains=spare_domains)
        # Where no GPU is left the ideal is nothing, and every scheme reaches it.
        ratios = np.where(left > 0, found * fleet.num_gpus / np.maximum(left, 1), 1.0)
        rows.append(
            SimulatedRow(
                fleet=fleet,
                scheme=scheme.name,
                failed=float(hit.mean()),
                throughput=float(found.mean()),
                ratio=float(ratios.mean()),
                spread=float(ratios.std(ddof=1)) if placements > 1 else 0.0,
                least=float(ratios.min()),
                placements=placements,
            )
        )
    return rows


def check_spares(spare_domains: int) -> None:
    """Raise a `ConfigError` for a negative number of spare domains."""
    if spare_domains < 0:
        raise ConfigError(
            f"spare_domains={spare_domains}",
            found="a negative number",
            why="Spare domains stand beside the job.",
            fix="Use 0 or more.",
        )
