"""What failed GPUs would cost jobs of 10,000 to 100,000 GPUs, as `pcomm.ntp.simulate` predicts it.

Nothing here is measured. Two tables have the throughput over the ideal for random places of failed
GPUs, with work that any degree splits evenly and with attention that is split by whole heads; a
third has days of failures and repairs at the rates of the training of Llama 3 405B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pcomm.ntp.simulate.failure_rates import FailureRates
from pcomm.ntp.simulate.fleet import Fleet
from pcomm.ntp.simulate.granularity import UnitWork
from pcomm.ntp.simulate.placements import simulate
from pcomm.ntp.simulate.replay import simulate_trace
from pcomm.ntp.simulate.schemes import SCHEMES

__all__ = [
    "FLEETS",
    "GOAL",
    "HEADS",
    "SHARES",
    "TRACED",
    "Prediction",
    "predict_places",
    "predict_traces",
]

GOAL = 0.995
"""Share of the ideal that nonuniform tensor parallelism is to keep."""

SHARES = (0.001, 0.002, 0.003, 0.004)
"""Failed GPUs over all GPUs."""

HEADS = UnitWork(num_units=128, share=1 / 3)
"""Attention of the model in the paper: 128 heads, about a third of the work."""

FLEETS = tuple(
    Fleet(num_gpus, tp, replica // tp)
    for tp, sizes in {
        8: {9216: 256, 32768: 256, 100800: 320},
        16: {9216: 256, 32768: 256, 100800: 320},
        32: {9216: 256, 32768: 256, 100800: 320},
        64: {9216: 256, 32768: 256, 100800: 320},
        72: {9216: 288, 32832: 288, 100800: 288},
    }.items()
    for num_gpus, replica in sizes.items()
)
"""Jobs whose replicas have about 256 GPUs, for each tensor-parallel degree."""

TRACED = (Fleet(32768, 32, 8), *(fleet for fleet in FLEETS if fleet.num_gpus == 100800))
"""The job of the paper, and the largest of each degree."""

_SPARES = "drop packed, spares"
_SPARE_REPLICAS = 2
# What a job loses each time that it is started again, and where it goes on in place. Assumed.
_RESTART_S, _IN_PLACE_S = 180.0, 10.0


@dataclass(frozen=True)
class Prediction:
    """A predicted number.

    Args:
        kind: Name of its table.
        scheme: Name of the policy.
        fleet: GPUs of the job.
        condition: Words for the failures.
        value: The number.
        unit: Unit of the number.
        placements: Number of random placements behind it.
    """

    kind: str
    scheme: str
    fleet: Fleet
    condition: str
    value: float
    unit: str
    placements: int


def predict_places(
    fleets: tuple[Fleet, ...] = FLEETS, *, placements: int = 60
) -> Iterator[Prediction]:
    """Throughput over the ideal, by scheme, for random places of failed GPUs.

    Args:
        fleets: Jobs.
        placements: Number of random placements of each share of failed GPUs.

    Yields:
        One number for each job, share, scheme, and way to split attention. The scheme with spares
        has two whole replicas of spare domains, which count as GPUs of the ideal.
    """
    for kind, units in {"even work": (), "128 heads": (HEADS,)}.items():
        for fleet in fleets:
            for share in SHARES:
                found = simulate(fleet, share, units=units, placements=placements)
                spared = simulate(
                    fleet,
                    share,
                    ["drop packed"],
                    units=units,
                    placements=placements,
                    spare_domains=_SPARE_REPLICAS * fleet.domains_per_replica,
                )
                for row in [*found, replace(spared[0], scheme=_SPARES)]:
                    yield Prediction(
                        f"predicted, {kind}",
                        row.scheme,
                        fleet,
                        f"{share:.1%} failed",
                        round(row.ratio, 4),
                        "of the ideal",
                        placements,
                    )


def predict_traces(fleets: tuple[Fleet, ...] = TRACED, *, days: float = 15) -> Iterator[Prediction]:
    """Numbers of a trace of failures and repairs, by scheme, without and with pauses.

    Args:
        fleets: Jobs.
        days: Length of the trace.

    Yields:
        The goodput over the ideal without a pause, and with 10 s for each change of shape where
        damage stays in place and 3 minutes where domains change replicas, which is a restart; the
        spare domains with which the global batch would never shrink; the changes of shape a day;
        and the share of the time with more than 0.1 % of the GPUs failed.
    """
    for fleet in fleets:
        plain = simulate_trace(fleet, FailureRates(), days=days)
        for scheme, row in zip(SCHEMES, plain, strict=True):
            goes_on = scheme.shrinks and scheme.packing == "in_place"
            pause_s = _IN_PLACE_S if goes_on else _RESTART_S
            paused = min(1.0, row.reconfigurations_per_day * pause_s / 86_400)
            for unit, value in {
                "of the ideal, no pauses": round(row.ratio, 4),
                "of the ideal, with pauses": round(row.ratio * (1 - paused), 4),
                "spare domains for a full batch": row.spares_without_loss,
                "changes of shape a day": round(row.reconfigurations_per_day, 1),
                "of the time above 0.1 % failed": round(row.above_share, 3),
            }.items():
                yield Prediction(
                    "predicted, Llama 3 rates",
                    scheme.name,
                    fleet,
                    f"{days:g} days",
                    value,
                    unit,
                    1,
                )
