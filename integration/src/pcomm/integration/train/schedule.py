"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import NamedTuple

from pcomm.integration.config import TrainConfig

__all__ = ["Rewarm", "learning_rate"]


class Rewarm(NamedTuple):
    """Where a run was changed so that its learning rate would jump.

    Attributes:
        step: The first step after the change, from 0.
        rate: The learning rate of the step before.
    """

    step: int
    rate: float


def learning_rate(config: TrainConfig, step: int, rewarm: Rewarm | None = None) -> float:
    """Linear warm-up to `learning_rate`, then what `train.schedule` says. Local.

    Args:
        config: Rates, lengths and the schedule.
        step: Number of the step, from 0; with a cosine the last step of the run has the minimum.
        rewarm: Place from which the rate moves in a straight line to that of the schedule, over
            `train.rewarm_steps`; None if it follows the schedule everywhere.
    """
    rate = _scheduled(config, step)
    if rewarm is not None and 0 <= step - rewarm.step < config.rewarm_steps:
        share = (step - rewarm.step + 1) / config.rewarm_steps
        return rewarm.rate + (rate - rewarm.rate) * share
    return rate


def _scheduled(config: TrainConfig, step: int) -> float:
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = (step - warmup + 1) / max(1, config.steps - warmup)
    ratio = config.min_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
