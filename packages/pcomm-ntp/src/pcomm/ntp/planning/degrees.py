"""The tensor-parallel degree of each replica and stage, from the ranks that are left there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from pcomm.core.errors import LayoutError, TopologyError, UnsupportedError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.units import Units

__all__ = ["Domain", "check_topology", "damage", "degrees", "relative_speed", "rounded", "size_of"]

# Coordinates of one tensor-parallel group: those on every axis but `tp`, in the order of names.
Domain = tuple[tuple[str, int], ...]


def size_of(topology: Topology, axis: str) -> int:
    """Size of an axis, 1 if the topology does not have it."""
    return topology.axes.get(axis, 1)


def check_topology(topology: Topology) -> None:
    """Raise unless the topology has the axes `tp` and `dp`, and no views."""
    missing = [axis for axis in ("tp", "dp") if axis not in topology.axes]
    if missing:
        raise TopologyError(
            f"plan: axis {missing[0]!r}",
            found=f"axes {', '.join(topology.axes)}",
            why="Replicas are counted on 'dp', and each is split over 'tp'.",
            fix=f"Add {missing[0]!r} to the topology, of size 1 if need be.",
        )
    if topology.views:
        raise UnsupportedError(
            f"plan: views {', '.join(sorted(topology.views))}",
            found="a topology with another factorisation of its ranks, such as for experts",
            why="Units of experts are not planned yet, so their ranks would be left out.",
            fix="Plan a topology without views, for models without experts.",
        )


def damage(topology: Topology) -> Mapping[Domain, int]:
    """Number of failed ranks of each tensor-parallel group that has any."""
    failed: dict[Domain, int] = defaultdict(int)
    for rank in sorted(topology.failed):
        place = topology.coordinates(rank)
        del place["tp"]
        failed[tuple(sorted(place.items()))] += 1
    return dict(failed)


def relative_speed(units: Sequence[Units], degree: int, full: int) -> Fraction:
    """Time of a stage at the full degree over its time at `degree`: 1 at the full degree.

    The busiest rank sets the time: for each kind of units, its number of units over all of them,
    weighted by their work. Without any work, the degrees themselves are compared.
    """

    def time(ranks: int) -> Fraction:
        busiest = [Fraction(u.work * u.most_units(ranks), u.count) for u in units if u.is_split]
        return sum(busiest, Fraction(0)) or Fraction(1, ranks)

    return time(full) / time(degree)


def rounded(units: Sequence[Units], survivors: int, full: int, policy: Policy) -> int:
    """The degree that `survivors` of `full` ranks train at."""
    if policy.rounding == "max" or survivors == full:
        return survivors
    best = relative_speed(units, survivors, full)
    # More ranks are never slower, so the fewest that are as fast are found by halving.
    low, high = 1, survivors
    while low < high:
        middle = (low + high) // 2
        if relative_speed(units, middle, full) == best:
            high = middle
        else:
            low = middle + 1
    return low


def degrees(
    topology: Topology, units: Mapping[str, Units], policy: Policy
) -> tuple[tuple[int, ...], ...]:
    """The degree of each replica (first index) and stage (second index).

    The tensor-parallel groups of one replica and stage, such as those along `cp`, hold the same
    heads and exchange them, so they have the same degree: that of the most damaged one.

    Raises:
        TopologyError: All ranks of a tensor-parallel group have failed.
        LayoutError: A degree above the number of units, or above the limit on memory.
    """
    full, stages = topology.axes["tp"], size_of(topology, "pp")
    for name, unit in units.items():
        if unit.is_split and unit.count < full:
            raise LayoutError(
                f"plan: {name!r} over tp={full}",
                found=f"{unit.count} units ({unit.kind})",
                why="Each rank of a tensor-parallel group has at least one whole unit.",
                fix=f"Use tp={unit.count} or less, or describe {name!r} as Units.replicated().",
            )
    least: dict[tuple[int, int], int] = {}
    for domain, count in damage(topology).items():
        place = dict(domain)
        if count == full:
            where = ",".join(f"{axis}={value}" for axis, value in domain)
            raise TopologyError(
                f"plan: the tensor-parallel group at {where}",
                found=f"all {full} ranks have failed",
                why="A replica goes on with the ranks that are left, and here none is.",
                fix=f"Plan without replica dp={place['dp']}, or put spare ranks in their place.",
            )
        key = place["dp"], place.get("pp", 0)
        least[key] = min(least.get(key, full), full - count)
    table = [[full] * stages for _ in range(topology.axes["dp"])]
    kinds = list(units.values())
    by_survivors = {n: rounded(kinds, n, full, policy) for n in sorted(set(least.values()))}
    for (replica, stage), survivors in least.items():
        degree = _within_memory(units, by_survivors[survivors], survivors, full, policy)
        if degree == 0:
            growth = _growth(kinds, survivors, full)
            raise LayoutError(
                f"plan: replica dp={replica}, stage pp={stage} at degree {survivors}",
                found=f"{_bytes(policy, growth)} bytes on a rank, {policy.memory_limit} allowed",
                why=f"{survivors} of {full} ranks hold {float(growth):.3f} times as much each.",
                fix="Raise memory_limit, shard the optimizer, recompute activations to free "
                f"memory, or plan without replica dp={replica}.",
            )
        table[replica][stage] = degree
    if policy.memory_limit and policy.rank_bytes > policy.memory_limit:
        raise LayoutError(
            f"plan: memory_limit={policy.memory_limit}",
            found=f"{policy.rank_bytes} bytes on a rank without any failure",
            why="A rank at the full degree does not fit, and one at a reduced degree holds more.",
            fix="Raise memory_limit, or split the model over more ranks.",
        )
    return tuple(map(tuple, table))


def _growth(units: Iterable[Units], degree: int, full: int) -> Fraction:
    split = [u for u in units if u.is_split]
    grown = (Fraction(u.most_units(degree), u.most_units(full)) for u in split)
    return max(grown, default=Fraction(1))


def _bytes(policy: Policy, growth: Fraction) -> int:
    return -(-policy.rank_bytes * growth.numerator // growth.denominator)


def _within_memory(
    units: Mapping[str, Units], degree: int, survivors: int, full: int, policy: Policy
) -> int:
    """The least degree from `degree` to `survivors` that fits; 0 if none does."""
    if not policy.memory_limit:
        return degree
    for ranks in range(degree, survivors + 1):
        if _bytes(policy, _growth(units.values(), ranks, full)) <= policy.memory_limit:
            return ranks
    return 0
