"""What a plan costs, in exact fractions, and which damaged groups should share a replica.

These are predictions from counts of units, not measurements. A replica is as fast as its slowest
stage. So damaged groups of equal damage belong together after a restart: they slow one replica
down, and not one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TypeVar

from pcomm.core.topology import Topology
from pcomm.ntp.planning.cuts import Form, RankSpeeds, combined
from pcomm.ntp.planning.degrees import Domain, Policy, chosen, survivors
from pcomm.ntp.planning.units import Units, relative_speed

__all__ = ["Cost", "PackingAdvice", "ReplicaCost", "changed_lines", "first_lines", "pack"]


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
        memory_growth: Most that the split bytes of a rank have grown to, over those at the full
            degree; without `Policy.rank_bytes` by name, those of the kind that grows most.
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


@dataclass(frozen=True)
class Swap:
    """Two tensor-parallel groups that change places, rank by rank.

    Args:
        one: Coordinates of the first group on every axis but `tp`.
        other: Coordinates of the second group.
    """

    one: Domain
    other: Domain

    def __str__(self) -> str:
        ends = (",".join(f"{axis}={n}" for axis, n in end) for end in (self.one, self.other))
        return " <-> ".join(ends)


@dataclass(frozen=True)
class PackingAdvice:
    """Swaps of tensor-parallel groups, in the order in which they are done, and their gain.

    Args:
        swaps: Nothing if no swap makes the job faster.
        speed_before: Sum of the speeds of all replicas as they are, a healthy one being 1.
        speed_after: The same sum after the swaps.
    """

    swaps: tuple[Swap, ...]
    speed_before: Fraction
    speed_after: Fraction


def pack(
    topology: Topology, slow: RankSpeeds, units: Sequence[Units], policy: Policy
) -> PackingAdvice:
    """Put damaged groups into as few replicas as possible, those of equal damage together."""
    replicas, full = topology.axes["dp"], topology.axes["tp"]
    inner = sorted(set(topology.axes) - {"tp", "dp"})
    slots = [
        tuple(zip(inner, place, strict=True))
        for place in product(*(range(topology.axes[axis]) for axis in inner))
    ]

    def at(replica: int, slot: Domain) -> Domain:
        return tuple(sorted((*slot, ("dp", replica))))

    alive = survivors(topology, slow)
    known: dict[tuple[Form, ...], Fraction] = {}

    def speed(groups: Sequence[Form]) -> Fraction:
        key = tuple(groups)
        if not all(groups):
            return Fraction(0)
        if key not in known:
            degree = chosen(units, groups, full, policy)
            known[key] = relative_speed(units, combined(groups, degree), full)
        return known[key]

    def total(damaged: dict[Domain, Form]) -> Fraction:
        stages: dict[int, dict[int, set[Form]]] = {}
        for domain, rates in damaged.items():
            place = dict(domain)
            own = stages.setdefault(place["dp"], {})
            own.setdefault(place.get("pp", 0), set()).add(rates)
        slowest = (min(speed(sorted(groups)) for groups in own.values()) for own in stages.values())
        return replicas - len(stages) + sum(slowest, Fraction(0))

    before = total(alive)
    # Those of most damage share a replica first.
    alone = {rates: (speed([rates]), len(rates)) for rates in set(alive.values())}
    worst_first = sorted(alive, key=lambda domain: (alone[alive[domain]], domain))
    chunks = [worst_first[i : i + len(slots)] for i in range(0, len(worst_first), len(slots))]
    place = {domain: domain for domain in worst_first}
    content = {domain: domain for domain in worst_first}
    swaps = []
    for chunk in chunks:
        # The replica that holds most of them. It took none before: each that did is full of them.
        target = Counter(dict(place[domain])["dp"] for domain in chunk).most_common(1)[0][0]
        free = [slot for slot in (at(target, s) for s in slots) if content.get(slot) not in chunk]
        for domain in chunk:
            here = place[domain]
            if dict(here)["dp"] == target:
                continue
            there = free.pop(0)
            evicted = content.pop(there, None)
            if evicted is None:
                del content[here]
            else:
                content[here], place[evicted] = evicted, here
            content[there], place[domain] = domain, there
            swaps.append(Swap(here, there))
    after = total({place[domain]: rates for domain, rates in alive.items()})
    if after <= before:
        return PackingAdvice((), before, before)
    return PackingAdvice(tuple(swaps), before, after)


T = TypeVar("T")


# Replicas of equal outcome that a line names, slow ranks and swaps that have one; JSON has all.
_MOST_NAMED = 8


def changed_lines(replicas: Iterable[ReplicaCost]) -> list[str]:
    """A line for all replicas of one outcome, which names the first of them."""
    alike: dict[str, list[str]] = {}
    for one in replicas:
        why = ""
        if one.uneven:
            why = f", {one.uneven} cut with efficiency {float(one.efficiency):.3f}"
        outcome = (
            f"tp {'/'.join(map(str, one.degrees))}, speed {float(one.speed):.3f}, "
            f"memory up to x{float(one.memory_growth):.3f}, {one.idle} idle{why}"
        )
        alike.setdefault(outcome, []).append(str(one.replica))
    lines = []
    for outcome, own in alike.items():
        more = len(own) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        lines.append(f"dp={','.join(own[:_MOST_NAMED])}{rest}: {outcome}")
    return lines


def first_lines(found: Sequence[T], line: Callable[[T], str], what: str) -> list[str]:
    """A line for each of the first of many, and how many more of `what` there are."""
    more = len(found) - _MOST_NAMED
    return [*map(line, found[:_MOST_NAMED]), *([f"more {what}: {more}"] if more > 0 else [])]
