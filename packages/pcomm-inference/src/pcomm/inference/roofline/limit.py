"""The time that the memory's bandwidth allows for a step, and how near a step is to it."""

from __future__ import annotations

__all__ = ["floor_ms", "ratio"]


def floor_ms(num_bytes: int, bandwidth: float) -> float:
    """Milliseconds in which memory moves the bytes of a step; no step can be faster.

    Args:
        num_bytes: Bytes that the step moves, `StepBytes.total`.
        bandwidth: Bytes per second, `MemoryBandwidth.largest`.
    """
    return 1e3 * num_bytes / bandwidth


def ratio(floor_ms: float, step_ms: float) -> float:
    """The share of the limit that a step reaches, from 0 to 1.

    Above 1 the bandwidth was measured at another time, or on other bytes, than the step.

    Args:
        floor_ms: Milliseconds that the bandwidth allows.
        step_ms: Milliseconds that the step took.
    """
    return floor_ms / step_ms
