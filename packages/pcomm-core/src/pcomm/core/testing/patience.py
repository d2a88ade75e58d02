"""Time limits of tests: far beyond what is needed, and longer where the machine is busy.

No test says that something was quick enough. A limit only ends what would never end, so it costs
nothing where the code is right, and a machine that is busy with other work gets more of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pcomm.core.process import environment

__all__ = ["LONGEST_S", "PATIENCE_S", "load_factor", "rank_limit_s", "scaled_s", "wait_until"]

PATIENCE_S = 120.0
"""How long a test waits for what is sure to happen, on a machine with nothing else to do."""

LONGEST_S = 480.0
"""What no time limit of a test exceeds by itself; the limit of pytest-timeout lies above it."""


def load_factor() -> float:
    """How many threads want each core, at least 1: so much slower is everything. Local."""
    try:
        waiting = os.getloadavg()[0]
    except OSError:
        return 1.0
    return max(1.0, waiting / (os.cpu_count() or 1))


def scaled_s(quiet_s: float) -> float:
    """A time limit in seconds, for now.

    Args:
        quiet_s: The limit on a machine with nothing else to do, in seconds. A limit above
            `LONGEST_S` is not scaled.
    """
    return max(quiet_s, min(LONGEST_S, quiet_s * load_factor()))


def rank_limit_s() -> float:
    """The limit of one test on ranks: `PCOMM_RANKS_TIMEOUT_S`, scaled."""
    return scaled_s(environment.ranks_timeout_s())


def wait_until(claim: Callable[[], object], what: str, *, within_s: float | None = None) -> None:
    """Return as soon as `claim()` is true; look often. Local.

    Args:
        claim: A cheap condition that becomes true at some time.
        what: Description of the condition, for the message.
        within_s: Time limit in seconds; by default `PATIENCE_S`, scaled.

    Raises:
        AssertionError: It did not become true.
    """
    limit_s = scaled_s(PATIENCE_S) if within_s is None else within_s
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.01)
