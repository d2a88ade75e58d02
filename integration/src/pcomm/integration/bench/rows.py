"""What a part has found: rows of a CSV, and goals with what was reached."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import torch

from pcomm.core.testing.timing import Row, Timing

__all__ = ["Found", "Goal"]


@dataclass(frozen=True)
class Goal:
    """A number that was to be reached, and the one that was.

    Args:
        what: The quantity and its unit.
        limit: The number to reach.
        reached: The number that was measured.
        is_most: True if less is better, false if more is.
    """

    what: str
    limit: float
    reached: float
    is_most: bool

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached <= self.limit if self.is_most else self.reached >= self.limit


class Found:
    """Rows and goals of one part.

    Args:
        part: Name of the part.

    Attributes:
        part: Name of the part.
        rows: Rows so far.
        goals: Goals so far.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.rows: list[Row] = []
        self.goals: list[Goal] = []

    def value(
        self,
        case: str,
        value: float,
        unit: str,
        rounds: int,
        *,
        ratio_to: str = "",
        ratio: float | None = None,
    ) -> None:
        """Add a row.

        Args:
            case: Name of what was measured, and behind ` @ ` where.
            value: The number.
            unit: Its unit; no other row of the case has it.
            rounds: Number of rounds behind it.
            ratio_to: Another case of the same unit; empty for none.
            ratio: This value over that one, as the median of the ratios within a round.
        """
        shown = None if ratio is None else round(ratio, 3)
        self.rows.append(
            Row(
                f"serving {self.part}",
                case,
                round(value, 4),
                unit,
                ratio_to,
                shown,
                rounds,
                torch=f"{torch.__version__}, transformers {version('transformers')}",
            )
        )

    def time(
        self, case: str, timing: Timing, unit: str, *, beside: tuple[str, Timing] | None = None
    ) -> None:
        """Add a row of milliseconds.

        Args:
            case: Case as for `value`.
            timing: Times of all rounds.
            unit: Words that begin with `ms`.
            beside: Another case with its times, for the ratio.
        """
        self.value(
            case,
            timing.median_us / 1e3,
            unit,
            len(timing.rounds_us),
            ratio_to=beside[0] if beside else "",
            ratio=timing.ratio_to(beside[1]) if beside else None,
        )

    def tokens(
        self,
        case: str,
        step: Timing,
        num_tokens: int,
        *,
        beside: tuple[str, Timing] | None = None,
    ) -> None:
        """Add a row of tokens/s.

        Args:
            case: Case as for `value`.
            step: Times of a step in all rounds.
            num_tokens: Number of tokens that a step writes.
            beside: Another case with the times of its step, which writes as many.
        """
        self.value(
            case,
            num_tokens / (step.median_us / 1e6),
            "tokens/s",
            len(step.rounds_us),
            ratio_to=beside[0] if beside else "",
            ratio=beside[1].ratio_to(step) if beside else None,
        )

    def at_most(self, what: str, limit: float, reached: float) -> None:
        """Add a goal of which less is better."""
        self.goals.append(Goal(what, limit, reached, True))

    def at_least(self, what: str, limit: float, reached: float) -> None:
        """Add a goal of which more is better."""
        self.goals.append(Goal(what, limit, reached, False))
