"""Times of the forms on ranks that start together: in turns, and as the slowest rank has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.testing.timing import Timing
from pcomm.gdn_cp.bench.exchange_case import Case

__all__ = ["seconds_together", "time_together"]

_FEWEST = 3


def time_together(
    cases: Mapping[str, Case],
    collectives: Collectives,
    *,
    rounds: int,
    seconds: float,
    first: Mapping[str, float],
) -> dict[str, Timing]:
    """In each round every case once. Collective; the same result on every rank.

    One round goes before and does not count, but for cases that would take more than `seconds`;
    those also have a turn only in the first rounds, at least in 3.

    Args:
        cases: Calls to time, by name, in the same order on every rank.
        collectives: The group's collectives.
        rounds: Number of rounds that count.
        seconds: Time limit of a case, which sets its number of rounds.
        first: Seconds that each took when it ran before, the same on every rank.
    """
    turns = {
        name: min(rounds, max(_FEWEST, int(seconds / max(first[name], 1e-9)))) for name in cases
    }
    for name, case in cases.items():
        if turns[name] == rounds:
            case.run()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(rounds):
        for name, case in cases.items():
            if index < turns[name]:
                found[name].append(seconds_together(case.run, collectives) * 1e6)
    return {name: Timing(name, tuple(times)) for name, times in found.items()}


def seconds_together(run: Callable[[], object], collectives: Collectives) -> float:
    """Seconds that `run` takes on the slowest rank, from when all are there. Collective."""
    collectives.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(collectives.all_reduce(taken, op="max"))
