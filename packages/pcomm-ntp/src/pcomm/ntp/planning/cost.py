"""What a plan costs, in exact fractions: predictions from counts of units, not measurements."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Cost", "ReplicaCost"]


@dataclass(frozen=True)
class ReplicaCost:
    """One replica against one at the full degree.

    Args:
        replica: Coordinate on `dp`.
        degrees: Tensor-parallel degree of each stage.
        idle: Number of surviving ranks that are not used.
        speed: Speed of the slowest stage; 1 for a healthy replica.
        efficiency: Least efficiency of any cut, mean over maximum units of a rank; 1 if all cuts
            are even.
        uneven: Name of the units with this efficiency, empty if all cuts are even.
        memory_growth: Largest growth of the split bytes of a rank.
    """

    replica: int
    degrees: tuple[int, ...]
    idle: int
    speed: Fraction
    efficiency: Fraction
    uneven: str
    memory_growth: Fraction


@dataclass(frozen=True)
class Cost:
    """The whole job.

    Args:
        replicas: Costs of the replicas at a reduced degree, ascending.
        throughput: Mean speed over all replicas; 1 without failures.
        ratio_to_ideal: Throughput over the share of ranks that are left.
        most_segments: Largest number of segments, and so of groups for each place on the axes
            other than `tp` and `dp`, of any units and stage.
    """

    replicas: tuple[ReplicaCost, ...]
    throughput: Fraction
    ratio_to_ideal: Fraction
    most_segments: int
