"""Where the time of a step goes on the host, by phase."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

__all__ = ["HostTimes"]


class HostTimes:
    """Times of the phases of a step, one after the other; the last ones of each are kept.

    ```python
    times.begin()
    plan = scheduler.plan()
    times.lap("schedule")
    logits = model.step(plan.batch, memory)
    times.lap("model")
    ```

    Args:
        kept: Number of times of each phase that are kept.
        clock: Nanoseconds since any time.
    """

    def __init__(self, kept: int = 256, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._kept = kept
        self._clock = clock
        self._begun = self._last = 0
        self._phases: dict[str, deque[int]] = {}

    def begin(self) -> None:
        """Begin a step: the first phase is measured from here."""
        self._begun = self._last = self._clock()

    def lap(self, phase: str) -> None:
        """End a phase, which began with `begin` or where the one before it ended."""
        now = self._clock()
        if phase not in self._phases:
            self._phases[phase] = deque(maxlen=self._kept)
        self._phases[phase].append(now - self._last)
        self._last = now

    @property
    def step_ns(self) -> int:
        """Nanoseconds from the begin of the step to the end of its last phase so far."""
        return self._last - self._begun

    def medians_us(self) -> dict[str, float]:
        """Median of the kept times of each phase, in microseconds, in the order of first use."""
        return {phase: median(times) / 1e3 for phase, times in self._phases.items() if times}
