"""The speed of a domain that has lost GPUs, with the units that cannot be cut any further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pcomm.core.errors import ConfigError
from pcomm.ntp.simulate.fleet import positive

__all__ = ["UnitWork", "degree_speeds", "granularity"]


@dataclass(frozen=True)
class UnitWork:
    """Work that is split by whole units, such as attention by its heads.

    Args:
        num_units: Number of units, which the ranks of a domain share as evenly as they can.
        share: Share of the work of a step, in 0 to 1. Attention is about a third.

    Raises:
        ConfigError: A number of units below 1, or a share outside of 0 to 1.
    """

    num_units: int
    share: float

    def __post_init__(self) -> None:
        positive("UnitWork: num_units", self.num_units)
        if not 0 <= self.share <= 1:
            raise ConfigError(
                f"UnitWork: share={self.share}",
                found=f"{self.share}",
                why="It is a share of all the work of a step.",
                fix="Use a number from 0 to 1.",
            )


def granularity(num_units: int, degree: int) -> Fraction:
    """The efficiency of `degree` ranks that share whole units: the mean load over the largest."""
    return Fraction(num_units, degree * -(-num_units // degree))


def degree_speeds(tp: int, units: Sequence[UnitWork] = ()) -> list[Fraction]:
    """The speeds of a domain with 0 to `tp` failed GPUs, relative to one without a failure.

    Args:
        tp: Number of GPUs of the domain.
        units: Work that is split by whole units; the rest is split evenly to any degree.

    Returns:
        `tp + 1` numbers that do not rise; the last, with no GPU left, is 0.

    Raises:
        ConfigError: The shares of `units` are more than 1 together.
    """
    shares = [Fraction(work.share).limit_denominator(10**9) for work in units]
    rest = 1 - sum(shares, Fraction())
    # Each share is rounded, so those of all the work may add up to a little more than 1.
    if rest < -1e-9:
        raise ConfigError(
            "units",
            found=f"shares of {float(1 - rest):g} together",
            why="They are shares of one step's work.",
            fix="Use shares with a sum of at most 1.",
        )
    rest = max(rest, Fraction())

    def step_time(degree: int) -> Fraction:
        whole = (
            share * -(-work.num_units // degree) / work.num_units
            for share, work in zip(shares, units, strict=True)
        )
        return rest / degree + sum(whole, Fraction())

    full = step_time(tp)
    return [full / step_time(tp - failed) for failed in range(tp)] + [Fraction(0)]
