"""Measured latency and bandwidth of an all-to-all, for the cost model of plans."""

from __future__ import annotations

import statistics

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.bench.rounds import seconds_together
from pcomm.gdn_cp.strategies.cost import Link

__all__ = ["measure_link"]

_SMALL, _LARGE = 1 << 10, 1 << 23
_TIMES = 15


def measure_link(collectives: Collectives) -> Link:
    """The median time of a small all-to-all, and what a large one takes more. Collective."""
    small, large = (_seconds(collectives, size) for size in (_SMALL, _LARGE))
    share = (collectives.size - 1) / collectives.size
    more = max(large - small, 1e-9)
    return Link(small * 1e6, (_LARGE - _SMALL) * share / more / 1e9)


def _seconds(collectives: Collectives, num_bytes: int) -> float:
    x = torch.zeros(num_bytes // 4)
    return statistics.median(
        seconds_together(lambda: collectives.all_to_all(x), collectives) for _ in range(_TIMES)
    )
