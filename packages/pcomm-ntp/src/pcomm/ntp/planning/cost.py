"""What a plan costs, in exact fractions: predictions from counts of units, not measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pcomm.ntp.planning.degrees import size_of
from pcomm.ntp.planning.forms import Form, is_plain
from pcomm.ntp.planning.speed import memory_growth

if TYPE_CHECKING:
    from pcomm.ntp.planning.plan import Plan

__all__ = ["Cost", "ReplicaCost", "cost_of"]


@dataclass(frozen=True)
class ReplicaCost:
    """One replica against one at the full degree.

    Args:
        replica: Coordinate on `dp`.
        degrees: Tensor-parallel degree of each stage.
        forms: Form of each stage, which tells slow ranks from others.
        idle: Number of surviving ranks that are not used.
        speed: Speed of the slowest stage; 1 for a healthy replica.
        efficiency: Least efficiency of any cut, mean over maximum time of a rank; 1 if all cuts
            are even.
        uneven: Name of the units with this efficiency, empty if all cuts are even.
        memory_growth: Largest growth of the split bytes of a rank.
    """

    replica: int
    degrees: tuple[int, ...]
    forms: tuple[Form, ...]
    idle: int
    speed: Fraction
    efficiency: Fraction
    uneven: str
    memory_growth: Fraction


@dataclass(frozen=True)
class Cost:
    """The whole job.

    Args:
        replicas: Costs of the replicas at a reduced degree or with slow ranks, ascending.
        throughput: Mean speed over all replicas; 1 without failures.
        ratio_to_ideal: Throughput over the share of ranks that are left, a slow one counted by
            its speed.
        most_segments: Largest number of segments, and so of groups for each place on the axes
            other than `tp` and `dp`, of any units and stage.
    """

    replicas: tuple[ReplicaCost, ...]
    throughput: Fraction
    ratio_to_ideal: Fraction
    most_segments: int


def cost_of(plan: Plan) -> Cost:
    """Count what `plan` costs; see `Plan.cost`."""
    topology = plan.topology
    full, stages = topology.axes["tp"], size_of(topology, "pp")
    inner = topology.world_size // (full * stages * len(plan.degrees))
    lost = Counter(topology.coordinates(rank)["dp"] for rank in topology.failed)
    slow = {topology.coordinates(rank)["dp"] for rank, _ in plan.rank_speeds}
    split = [(name, units) for name, units in plan.units if units.is_split]
    kinds = [units for _, units in split]
    # Most replicas are changed alike.
    known: dict[int | Form, tuple[Fraction, str, Fraction]] = {}

    def uneven(replica: int, stage: int) -> tuple[Fraction, str, Fraction]:
        """Least efficiency of a cut, the name of its units, and the growth of memory."""
        rates = plan.rates(replica, stage)
        over: int | Form = len(rates) if is_plain(rates) and rates[0] == 1 else rates
        if over not in known:
            found = ((units.efficiency(over), name) for name, units in split)
            least = min(found, default=(Fraction(1), ""))
            known[over] = (*least, memory_growth(kinds, over, full))
        return known[over]

    changed = []
    for replica, own in enumerate(plan.degrees):
        if min(own) == full and replica not in slow:
            continue
        found = [uneven(replica, stage) for stage in range(stages) if own[stage]]
        found = found or [(Fraction(0), "", Fraction(0))]
        efficiency, name, _ = min(found)
        changed.append(
            ReplicaCost(
                replica=replica,
                degrees=own,
                forms=tuple(plan.form(replica, stage) for stage in range(stages)),
                idle=inner * (full * stages - sum(own)) - lost[replica],
                speed=plan.speeds[replica],
                efficiency=efficiency,
                uneven=name if efficiency < 1 else "",
                memory_growth=max(growth for _, _, growth in found),
            )
        )
    throughput = sum(plan.speeds, Fraction(0)) / len(plan.speeds)
    slowness = sum((1 - speed for _, speed in plan.rank_speeds), Fraction(0))
    left = topology.world_size - len(topology.failed) - slowness
    counts = [len(plan.segments(name, stage)) for name, _ in split for stage in range(stages)]
    ratio = throughput * topology.world_size / left
    return Cost(tuple(changed), throughput, ratio, max(counts, default=0))
