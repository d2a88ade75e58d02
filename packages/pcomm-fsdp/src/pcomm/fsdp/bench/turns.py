"""Cases that take turns, each timed on its slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.testing.namespaces import traffic
from pcomm.core.testing.timing import Timing

__all__ = ["Turn", "nothing", "seconds_of", "take_turns"]


def nothing() -> None:
    """Does nothing, for a turn that has nothing to prepare or to check."""


@dataclass(frozen=True)
class Turn:
    """A case, and what goes before and after it outside of its time.

    Args:
        run: Called, and timed.
        prepare: Called before.
        check: Called after; raises where the result is wrong.
    """

    run: Callable[[], None]
    prepare: Callable[[], None] = nothing
    check: Callable[[], None] = nothing


def take_turns(
    turns: Mapping[str, Turn], control: Collectives, rounds: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    """In each round every case once. Collective; the same result on every rank.

    Args:
        turns: The cases, by name.
        control: Ranks meet through it before each turn, and exchange their times.
        rounds: Number of turns of each case; one round more goes before and does not count.

    Returns:
        Times of each case, and the bytes that the rank which sent most has sent in a turn of it,
        with all headers, as the mean over the rounds.
    """
    times: dict[str, list[float]] = {case: [] for case in turns}
    sent = dict.fromkeys(turns, 0)
    for index in range(-1, rounds):
        for case, turn in turns.items():
            turn.prepare()
            control.all_reduce(torch.zeros(1))
            before = _sent_bytes()
            seconds = seconds_of(turn.run, control)
            turn.check()
            if index >= 0:
                times[case].append(seconds * 1e6)
                sent[case] += _sent_bytes() - before
    timings = {case: Timing(case, tuple(rounds_us)) for case, rounds_us in times.items()}
    means = torch.tensor([sent[case] / rounds for case in turns], dtype=torch.float64)
    most = control.all_reduce(means, op="max").tolist()
    return timings, dict(zip(turns, most, strict=True))


def seconds_of(run: Callable[[], None], control: Collectives) -> float:
    """Seconds that the slowest rank takes. Collective."""
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(control.all_reduce(taken, op="max"))


def _sent_bytes() -> int:
    """Bytes that this rank's links have sent, on all rails together."""
    return sum(found.sent_bytes for name, found in traffic().items() if name != "lo")
