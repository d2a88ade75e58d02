"""How fast a replica is, from counts of units alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from pcomm.ntp.planning.forms import busiest
from pcomm.ntp.planning.units import Units

__all__ = ["memory_growth", "relative_speed"]


def relative_speed(units: Sequence[Units], over: int | Sequence[Fraction], full: int) -> Fraction:
    """Time of a stage at the full degree over its time with the given ranks: 1 for a healthy one.

    The busiest rank sets the time: for each kind of units, its number of units over its speed and
    over their number, weighted by their work. Without any work, the speeds are added up.

    Args:
        units: Units of all parameters.
        over: Number of healthy ranks, or the speed of each rank.
        full: Tensor-parallel degree without failures.
    """

    def time(ranks: int | Sequence[Fraction]) -> Fraction:
        split = [u for u in units if u.is_split and u.work]
        longest = sum((u.work * busiest(u.count, ranks) / u.count for u in split), Fraction(0))
        total = Fraction(ranks) if isinstance(ranks, int) else sum(ranks, Fraction(0))
        return longest or 1 / total

    return time(full) / time(over)


def memory_growth(units: Iterable[Units], over: int | Sequence[Fraction], full: int) -> Fraction:
    """Largest number of units of a rank over that at the full degree, of any kind of units."""
    grown = (Fraction(u.most_units(over), u.most_units(full)) for u in units if u.is_split)
    return max(grown, default=Fraction(1))
