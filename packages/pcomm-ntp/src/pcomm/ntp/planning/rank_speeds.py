"""Ranks that are slower than the others, and which ranks of a group are used then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pcomm.core.errors import ConfigError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.forms import Form

__all__ = ["RankSpeeds", "combined", "fastest", "rank_speeds"]

RankSpeeds = tuple[tuple[int, Fraction], ...]
"""Pairs of a global rank and its speed below 1, ascending by rank; surviving ranks alone."""


def rank_speeds(topology: Topology, speeds: Mapping[int, float | Fraction]) -> RankSpeeds:
    """The slow ranks among the surviving ones, with exact speeds: 0.3 is three tenths.

    Raises:
        ConfigError: A speed outside of 0 < speed <= 1.
        TopologyError: A rank that the topology does not have.
    """
    found = []
    for rank, speed in sorted(speeds.items()):
        topology.coordinates(rank)
        if not 0 < speed <= 1:
            raise ConfigError(
                f"plan: speed {speed} of rank {rank}",
                found=f"{speed}, outside of 0 < speed <= 1",
                why="A speed is relative to that of a healthy rank, and a rank of speed 0 is gone.",
                fix="Give a number above 0 and at most 1, or name the rank among the failures.",
            )
        is_exact = isinstance(speed, int | Fraction)
        exact = Fraction(speed) if is_exact else Fraction(str(float(speed)))
        if exact < 1 and rank not in topology.failed:
            found.append((rank, exact))
    return tuple(found)


def fastest(rates: Sequence[Fraction], degree: int) -> list[int]:
    """Indices of the `degree` fastest ranks, ascending; the earlier of equal ones."""
    if degree == len(rates):
        return list(range(degree))
    return sorted(sorted(range(len(rates)), key=lambda i: -rates[i])[:degree])


def combined(groups: Sequence[Sequence[Fraction]], degree: int) -> Form:
    """Speeds of `degree` ranks for groups that hold the same units: the least at each index.

    Args:
        groups: Speeds of the surviving ranks of each group, ascending on `tp`.
        degree: Number of ranks that are used in each.
    """
    used = [[rates[i] for i in fastest(rates, degree)] for rates in groups]
    return tuple(min(at) for at in zip(*used, strict=True))
