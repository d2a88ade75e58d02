"""How a training run ended."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the same on all ranks.

    Args:
        steps: Number of optimizer steps done, over all starts.
        bits_per_byte: Bits per byte of the held-out documents after the last step; None if there
            are none, with `train.eval_every = "none"`, or if the run was interrupted.
        is_interrupted: True if a rank was asked to stop, by Ctrl-C or SIGTERM, before the end.
    """

    steps: int
    bits_per_byte: float | None
    is_interrupted: bool
