"""Which units of a parameter every rank holds under a plan, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pcomm.core.topology import Topology
from pcomm.ntp.planning.forms import cuts
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.planning.units import Units

__all__ = ["Interval", "WholeGroup", "held_by_group", "held_units", "whole_groups"]

Interval = tuple[int, int]
"""First unit, and the unit after the last one. A replicated parameter is the one unit 0."""


@dataclass(frozen=True)
class WholeGroup:
    """A tensor-parallel group of the whole topology, whichever of its ranks are left.

    Args:
        lowest: Rank at index 0 of `tp`; it names the group, and may have failed.
        replica: Coordinate on `dp`.
        stage: Coordinate on `pp`, 0 without that axis.
    """

    lowest: int
    replica: int
    stage: int


def whole_groups(topology: Topology) -> Mapping[int, tuple[WholeGroup, ...]]:
    """All tensor-parallel groups of a topology by stage, ascending by rank."""
    # Without failures: a group is there under every plan, whichever of its ranks are left.
    whole = Topology(topology.axes, topology.order, offset=topology.offset)
    found: dict[int, list[WholeGroup]] = {}
    for group in whole.groups("tp"):
        place = whole.coordinates(group[0])
        one = WholeGroup(group[0], place["dp"], place.get("pp", 0))
        found.setdefault(one.stage, []).append(one)
    return {stage: tuple(groups) for stage, groups in found.items()}


def held_by_group(plan: Plan, units: Units | None, group: WholeGroup) -> dict[int, Interval]:
    """The units of each rank that is used in a group, by global rank.

    Args:
        plan: Plan that is in force.
        units: Units of the parameter; None if it has none and is replicated.
        group: One of `whole_groups`.
    """
    used = plan.tensor_ranks(group.lowest)
    if not used or units is None or not units.is_split:
        return dict.fromkeys(used, (0, 1))
    own = cuts(units.count, plan.form(group.replica, group.stage))
    return dict(zip(used, pairwise(own), strict=True))


def held_units(plan: Plan, units: Units | None, rank: int) -> Interval | None:
    """The units of one rank; None if it is idle or has failed."""
    if rank in plan.topology.failed:
        return None
    place = plan.place(rank)
    if place.is_idle:
        return None
    if units is None or not units.is_split:
        return (0, 1)
    own = cuts(units.count, plan.form(place.replica, place.stage))
    return own[place.index], own[place.index + 1]
