"""The learning rate of each step."""

from __future__ import annotations

import math

from pcomm.integration.config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to `learning_rate`, then half a cosine down to its minimum. Local.

    Args:
        config: Rates and lengths.
        step: From 0; the last step of the run has the minimum.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, config.steps - warmup)
    ratio = config.min_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
