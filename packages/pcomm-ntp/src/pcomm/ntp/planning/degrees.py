"""The tensor-parallel degree of each replica and stage, from the ranks that are left there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

from pcomm.core.errors import LayoutError, TopologyError, UnsupportedError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.forms import Form, plain
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.rank_speeds import RankSpeeds, combined
from pcomm.ntp.planning.speed import memory_growth, relative_speed
from pcomm.ntp.planning.units import Units

__all__ = ["Domain", "check_topology", "chosen", "degrees", "size_of", "survivors"]

# A plan has a line for each replica; a job of more ranks is a mistake of writing.
_MOST_RANKS = 1 << 22

# Coordinates of one tensor-parallel group: those on every axis but `tp`, in the order of names.
Domain = tuple[tuple[str, int], ...]


def size_of(topology: Topology, axis: str) -> int:
    """Size of an axis, 1 if the topology does not have it."""
    return topology.axes.get(axis, 1)


def check_topology(topology: Topology) -> None:
    """Raise unless the topology has the axes `tp` and `dp`, no views, and not too many ranks."""
    missing = [axis for axis in ("tp", "dp") if axis not in topology.axes]
    if missing:
        raise TopologyError(
            f"plan: axis {missing[0]!r}",
            found=f"axes {', '.join(topology.axes)}",
            why="Replicas are counted on 'dp', and each is split over 'tp'.",
            fix=f"Add {missing[0]!r} to the topology, of size 1 if need be.",
        )
    if topology.world_size > _MOST_RANKS:
        raise TopologyError(
            f"plan: {topology.describe()[:100]}",
            found=f"more than {_MOST_RANKS} ranks",
            why="A plan has a degree for each replica, and no job has as many ranks.",
            fix="Give the sizes of the axes of the job.",
        )
    if topology.views:
        raise UnsupportedError(
            f"plan: views {', '.join(sorted(topology.views))}",
            found="a topology with another factorisation of its ranks, such as for experts",
            why="Units of experts are not planned yet, so their ranks would be left out.",
            fix="Plan a topology without views, for models without experts.",
        )


def survivors(topology: Topology, slow: RankSpeeds) -> dict[Domain, Form]:
    """Speeds of the surviving ranks of each tensor-parallel group, ascending on `tp`.

    Groups without failed or slow ranks are left out. A group without survivors has no speeds.
    """
    full, speed_of = topology.axes["tp"], dict(slow)
    failed: dict[Domain, set[int]] = defaultdict(set)
    speeds: dict[Domain, dict[int, Fraction]] = defaultdict(dict)
    for rank in sorted(topology.failed | speed_of.keys()):
        place = topology.coordinates(rank)
        index = place.pop("tp")
        domain = tuple(sorted(place.items()))
        if rank in topology.failed:
            failed[domain].add(index)
        else:
            speeds[domain][index] = speed_of[rank]
    equal: dict[int, Form] = {}
    found = {}
    for domain in [*failed, *(domain for domain in speeds if domain not in failed)]:
        lost, own = failed.get(domain, set()), speeds.get(domain)
        if own is None:
            found[domain] = equal.setdefault(full - len(lost), plain(full - len(lost)))
        else:
            alive = (i for i in range(full) if i not in lost)
            found[domain] = tuple(own.get(i, Fraction(1)) for i in alive)
    return found


def chosen(units: Sequence[Units], groups: Sequence[Form], full: int, policy: Policy) -> int:
    """The degree of tensor-parallel groups that hold the same units.

    Args:
        units: Units of all parameters.
        groups: Speeds of the surviving ranks of each group that is not whole.
        full: Tensor-parallel degree without failures.
        policy: Rounding of the degree.
    """
    most = min(map(len, groups))
    if policy.rounding == "max":
        return most
    healthy = min(sum(rate == 1 for rate in rates) for rates in groups)
    # With more ranks than are healthy, slow ones are used, and may hold the others up.
    by_degree = {
        n: relative_speed(units, combined(groups, n), full) for n in range(healthy + 1, most + 1)
    }
    if healthy:
        by_degree[healthy] = relative_speed(units, healthy, full)
    best = max(by_degree, key=lambda n: (by_degree[n], -n))
    if best != healthy or healthy == full:
        return best
    # More healthy ranks are never slower, so the fewest that are as fast are found by halving.
    low, high = 1, healthy
    while low < high:
        middle = (low + high) // 2
        if relative_speed(units, middle, full) == by_degree[healthy]:
            high = middle
        else:
            low = middle + 1
    return low


def degrees(
    topology: Topology, slow: RankSpeeds, units: Mapping[str, Units], policy: Policy
) -> tuple[tuple[int, ...], ...]:
    """The degree of each replica (first index) and stage (second index).

    The tensor-parallel groups of one replica and stage, such as those along `cp`, hold the same
    heads and exchange them, so they have the same degree: that of the most damaged one. It is 0 for
    a replica that the policy drops.

    Raises:
        TopologyError: All ranks of a tensor-parallel group have failed, and the policy drops no
            replica or no other one is left.
        LayoutError: A degree above the number of units, or above the limit on memory.
    """
    full, stages = topology.axes["tp"], size_of(topology, "pp")
    _check_units(units, full)
    if policy.memory_limit and policy.rank_bytes > policy.memory_limit:
        raise LayoutError(
            f"plan: memory_limit={policy.memory_limit}",
            found=f"{policy.rank_bytes} bytes on a rank without any failure",
            why="A rank at the full degree does not fit, and one at a reduced degree holds more.",
            fix="Raise memory_limit, or split the model over more ranks.",
        )
    groups: dict[tuple[int, int], list[Form]] = defaultdict(list)
    left = survivors(topology, slow)
    dropped = {dict(domain)["dp"] for domain, rates in left.items() if not rates}
    if not policy.drops_replicas or len(dropped) == topology.axes["dp"]:
        dropped.clear()
    for domain, rates in left.items():
        place = dict(domain)
        if place["dp"] in dropped:
            continue
        if not rates:
            where = ",".join(f"{axis}={value}" for axis, value in domain)
            raise TopologyError(
                f"plan: the tensor-parallel group at {where}",
                found=f"all {full} ranks have failed",
                why="A replica goes on with the ranks that are left, and here none is.",
                fix=f"Plan without replica dp={place['dp']}, or put spare ranks in their place.",
            )
        groups[place["dp"], place.get("pp", 0)].append(rates)
    table = [[0 if i in dropped else full] * stages for i in range(topology.axes["dp"])]
    kinds = list(units.values())
    # Most stages are damaged alike.
    known: dict[tuple[Form, ...], int] = {}
    for (replica, stage), own in groups.items():
        key = tuple(sorted(set(own)))
        if key not in known:
            known[key] = _within_memory(kinds, own, chosen(kinds, own, full, policy), full, policy)
        if known[key] == 0:
            most = min(map(len, own))
            growth = memory_growth(kinds, combined(own, most), full)
            raise LayoutError(
                f"plan: replica dp={replica}, stage pp={stage} at degree {most}",
                found=f"{_bytes(policy, growth)} bytes on a rank, {policy.memory_limit} allowed",
                why=f"A rank there holds {float(growth):.3f} times as much as one of {full}.",
                fix="Raise memory_limit, shard the optimizer, recompute activations to free "
                f"memory, or plan without replica dp={replica}.",
            )
        table[replica][stage] = known[key]
    return tuple(map(tuple, table))


def _check_units(units: Mapping[str, Units], full: int) -> None:
    for name, unit in units.items():
        if unit.is_split and unit.count < full:
            raise LayoutError(
                f"plan: {name!r} over tp={full}",
                found=f"{unit.count} units ({unit.kind})",
                why="Each rank of a tensor-parallel group has at least one whole unit.",
                fix=f"Use tp={unit.count} or less, or describe {name!r} as Units.replicated().",
            )


def _bytes(policy: Policy, growth: Fraction) -> int:
    return -(-policy.rank_bytes * growth.numerator // growth.denominator)


def _within_memory(
    units: Sequence[Units], groups: Sequence[Form], degree: int, full: int, policy: Policy
) -> int:
    """The least degree from `degree` to that of all survivors that fits; 0 if none does."""
    if not policy.memory_limit:
        return degree
    for ranks in range(degree, min(map(len, groups)) + 1):
        growth = memory_growth(units, combined(groups, ranks), full)
        if _bytes(policy, growth) <= policy.memory_limit:
            return ranks
    return 0
