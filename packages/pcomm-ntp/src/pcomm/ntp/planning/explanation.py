"""A plan in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pcomm.ntp.planning.degrees import size_of
from pcomm.ntp.planning.failures import Coord

if TYPE_CHECKING:
    from pcomm.ntp.planning.cost import ReplicaCost
    from pcomm.ntp.planning.plan import Plan

__all__ = ["explanation"]

# Replicas of equal outcome that a line names, slow ranks and swaps that have one; JSON has all.
_MOST_NAMED = 8


def explanation(plan: Plan) -> str:
    """Degrees, slow ranks, costs and advice; see `Plan.explain`."""
    cost, topology, slow = plan.cost(), plan.topology, plan.rank_speeds
    lines = [
        f"{topology.world_size} ranks, {len(topology.failed)} failed"
        + (f" and {len(slow)} slow, " if slow else ", ")
        + f"{len(cost.replicas)} of {len(plan.degrees)} replicas "
        + ("changed" if slow else "at a reduced degree"),
        f"throughput {float(cost.throughput):.4f} of a whole job, "
        f"{float(cost.ratio_to_ideal):.4f} of the ranks' that are left (predicted)",
    ]
    alike: dict[str, list[int]] = {}
    for one in cost.replicas:
        alike.setdefault(_outcome(one), []).append(one.replica)
    lines += [f"dp={_some(replicas)}: {outcome}" for outcome, replicas in alike.items()]
    for rank, speed in slow[:_MOST_NAMED]:
        place = plan.place(rank)
        lines.append(
            f"rank {rank} ({Coord(**topology.coordinates(rank))}): speed {float(speed):.3f}, "
            + ("idle" if place.is_idle else _units_of_rank(plan, rank))
        )
    lines += _more(slow, "slow ranks")
    for name, units in plan.units:
        most = max(len(plan.segments(name, stage)) for stage in range(size_of(topology, "pp")))
        how = f"{most} segments" if units.is_split else "all ranks together"
        lines.append(f"{name}: {units.kind}, {units.count} units, {how}")
    advice = plan.packing
    if advice.swaps:
        gain = float(advice.speed_after - advice.speed_before)
        lines.append(f"at the next restart, swap for {gain:.3f} replicas more of speed:")
        lines += [f"  {swap}" for swap in advice.swaps[:_MOST_NAMED]]
        lines += _more(advice.swaps, "swaps")
    return "\n".join(lines)


def _outcome(one: ReplicaCost) -> str:
    why = f", {one.uneven} cut with efficiency {float(one.efficiency):.3f}" if one.uneven else ""
    return (
        f"tp {'/'.join(map(str, one.degrees))}, speed {float(one.speed):.3f}, "
        f"memory x{float(one.memory_growth):.3f}, {one.idle} idle{why}"
    )


def _more(found: Sequence[object], what: str) -> list[str]:
    """A line that counts what has none."""
    more = len(found) - _MOST_NAMED
    return [] if more <= 0 else [f"more {what}: {more}"]


def _some(replicas: list[int]) -> str:
    """The first of the replicas, and how many more there are."""
    named = ",".join(map(str, replicas[:_MOST_NAMED]))
    more = len(replicas) - _MOST_NAMED
    return named if more <= 0 else f"{named} and {more} more"


def _units_of_rank(plan: Plan, rank: int) -> str:
    place = plan.place(rank)
    form = plan.form(place.replica, place.stage)
    held = {name: u.sizes(form)[place.index] for name, u in plan.units if u.is_split}
    whole = {name: u.count for name, u in plan.units if u.is_split}
    return ", ".join(f"{name} {n} of {whole[name]} units" for name, n in held.items()) or "used"
