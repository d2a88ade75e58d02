"""Host time of making a plan, its index tensors for every layer included."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from pcomm.core.testing.timing import Timing, time_cases
from pcomm.gdn_cp.bench.settings import SPEC, random_lengths
from pcomm.gdn_cp.plan import make_plan
from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = ["STRATEGIES", "PlanTime", "time_plans"]

STRATEGIES: tuple[Literal["auto"] | StrategyName, ...] = ("heads", "docs", "state", "auto")
_SIZES = (2, 4, 8)
_PACKS = {64: 8192, 1000: 65536}


class PlanTime(NamedTuple):
    """One row: how long it took to make a plan.

    Args:
        strategy: Strategy of the plan.
        size: Number of ranks it is for.
        num_sequences: Number of sequences of the pack, of random lengths.
        timing: Duration of one call, in time of this thread.
    """

    strategy: str
    size: int
    num_sequences: int
    timing: Timing


def time_plans(rounds: int = 15) -> list[PlanTime]:
    """Every strategy, packs of 64 and 1,000 sequences, 2, 4 and 8 ranks. Local, one thread."""
    torch.set_num_threads(1)
    found = []
    for count, num_tokens in _PACKS.items():
        for size in _SIZES:
            lengths = random_lengths(count, num_tokens, 2 * size)
            offsets = tuple(accumulate(lengths, initial=0))
            cases: dict[str, Callable[[], object]] = {
                strategy: partial(_make, offsets, size, strategy) for strategy in STRATEGIES
            }
            timings = time_cases(cases, rounds=rounds, round_s=0.0, clock=time.thread_time)
            found += [PlanTime(strategy, size, count, timings[strategy]) for strategy in STRATEGIES]
    return found


def _make(offsets: tuple[int, ...], size: int, strategy: Literal["auto"] | StrategyName) -> object:
    plan = make_plan(offsets, (size - 1, size), SPEC, strategy=strategy, hidden_dim=2048)
    return plan.prepare("cpu")
