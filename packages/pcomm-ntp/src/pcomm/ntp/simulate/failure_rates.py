"""How often GPUs fail and for how long, and a sequence of such outages drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate.fleet import Fleet, positive

__all__ = ["FailureRates", "Outages", "draw_outages"]


@dataclass(frozen=True)
class FailureRates:
    """Rates of failures that are independent of each other, outside of bursts.

    The defaults are those of the training of Llama 3 405B: 419 unexpected interruptions of 16,384
    GPUs in 54 days, 78 % of them hardware.

    Args:
        gpu_hours_per_failure: GPU-hours between two failures.
        hardware_share: Share of failures whose GPUs need `hardware_repair_h`, in 0 to 1.
        hardware_repair_h: Hours until a GPU returns after a hardware failure; one of these, each
            equally likely.
        software_repair_h: Hours until a GPU returns after any other failure.
        blast_radius: Number of neighbouring GPUs that a hardware failure takes out together.
        bursts_per_day: Mean number of bursts that begin in a day.
        burst_hours: Length of a burst, in hours.
        burst_factor: Rate in a burst over the rate outside of it; at least 1.

    Raises:
        ConfigError: A number outside of its range.
    """

    gpu_hours_per_failure: float = 16_384 * 54 * 24 / 419
    hardware_share: float = 0.78
    hardware_repair_h: tuple[float, ...] = (72.0, 120.0)
    software_repair_h: float = 3.0
    blast_radius: int = 1
    bursts_per_day: float = 0.0
    burst_hours: float = 1.0
    burst_factor: float = 7.0

    def __post_init__(self) -> None:
        positive("FailureRates: blast_radius", self.blast_radius)
        fine = {
            "gpu_hours_per_failure": self.gpu_hours_per_failure > 0,
            "hardware_share": 0 <= self.hardware_share <= 1,
            "hardware_repair_h": bool(self.hardware_repair_h) and min(self.hardware_repair_h) > 0,
            "software_repair_h": self.software_repair_h > 0,
            "bursts_per_day": self.bursts_per_day >= 0,
            "burst_hours": self.burst_hours > 0,
            "burst_factor": self.burst_factor >= 1,
        }
        for field in fields(self):
            if not fine.get(field.name, True):
                raise ConfigError(
                    f"FailureRates: {field.name}",
                    found=f"{getattr(self, field.name)!r}",
                    why="Times are above 0, shares in 0 to 1, and bursts do not lower the rate.",
                    fix=f"Leave it out for Llama 3's: {field.default!r}.",
                )


@dataclass(frozen=True)
class Outages:
    """GPUs that are out of a job for a time; outages of one GPU do not overlap.

    Args:
        gpu: Number of the GPU; shape [outages].
        start_h: Hour at which it fails.
        end_h: Hour at which it is back, which may be after the end of the trace.
        failures: Number of failures of the trace, where one can be several outages.
    """

    gpu: NDArray[np.int64]
    start_h: NDArray[np.float64]
    end_h: NDArray[np.float64]
    failures: int


def draw_outages(fleet: Fleet, rates: FailureRates, hours: float, seed: int = 0) -> Outages:
    """The outages of a trace that begins with all GPUs in order.

    Args:
        fleet: GPUs of the job.
        rates: Rates of failures and repairs.
        hours: Length of the trace.
        seed: Number that decides times and places.

    Returns:
        Outages by GPU and start; a GPU that fails again before it is back is out until the
        later of both repairs.
    """
    random = np.random.default_rng(seed)
    rate = fleet.num_gpus / rates.gpu_hours_per_failure
    times = [random.uniform(0, hours, random.poisson(rate * hours))]
    bursts = np.sort(random.uniform(0, hours, random.poisson(rates.bursts_per_day * hours / 24)))
    # A burst that begins within another one prolongs it, so that the factor is not taken twice.
    ends = np.minimum(bursts + rates.burst_hours, np.append(bursts[1:], hours))
    for begin, end in zip(bursts, ends, strict=True):
        extra = random.poisson(rate * (rates.burst_factor - 1) * (end - begin))
        times.append(random.uniform(begin, end, extra))
    start = np.concatenate(times)
    hardware = random.random(len(start)) < rates.hardware_share
    repair = np.where(
        hardware, random.choice(rates.hardware_repair_h, len(start)), rates.software_repair_h
    )
    place = random.integers(0, fleet.num_gpus, len(start))
    radius = np.where(hardware, rates.blast_radius, 1)
    first = place // radius * radius
    size = np.minimum(radius, fleet.num_gpus - first)
    offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    gpu = np.repeat(first, size) + offset
    merged = _merge(gpu, np.repeat(start, size), np.repeat(start + repair, size))
    return Outages(*merged, failures=len(start))


def _merge(
    gpu: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    order = np.lexsort((start, gpu))
    found: list[tuple[int, float, float]] = []
    for number, begin, back in zip(
        gpu[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True
    ):
        if found and found[-1][0] == number and begin <= found[-1][2]:
            found[-1] = (number, found[-1][1], max(back, found[-1][2]))
        else:
            found.append((number, begin, back))
    columns = list(zip(*found, strict=True)) or [(), (), ()]
    return (
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.float64),
        np.array(columns[2], dtype=np.float64),
    )
