"""Advice: which damaged tensor-parallel groups should share a replica, after a restart.

A replica is as fast as its slowest stage. So damaged groups of equal damage belong together: they
slow one replica down, and not one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from pcomm.core.topology import Topology
from pcomm.ntp.planning.degrees import Domain, chosen, survivors
from pcomm.ntp.planning.forms import Form
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.rank_speeds import RankSpeeds, combined
from pcomm.ntp.planning.speed import relative_speed
from pcomm.ntp.planning.units import Units

__all__ = ["Packing", "Swap", "pack"]


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
class Packing:
    """Swaps of tensor-parallel groups, in the order in which they are done, and their gain.

    Args:
        swaps: Nothing if no swap makes the job faster.
        speed_before: Sum of the speeds of all replicas as they are, a healthy one being 1.
        speed_after: The same sum after the swaps.
    """

    swaps: tuple[Swap, ...]
    speed_before: Fraction
    speed_after: Fraction


def pack(topology: Topology, slow: RankSpeeds, units: Sequence[Units], policy: Policy) -> Packing:
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
        return Packing((), before, before)
    return Packing(tuple(swaps), before, after)
