"""The tensor-parallel degree and form of each replica and stage, from the ranks that are left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, LayoutError, TopologyError, UnsupportedError, near_misses
from pcomm.core.topology import Topology
from pcomm.ntp.planning.cuts import Form, RankSpeeds, combined, is_plain, plain, relative
from pcomm.ntp.planning.units import Units, memory_growth, relative_speed

__all__ = [
    "Domain",
    "FormTable",
    "Policy",
    "Rounding",
    "check_topology",
    "chosen",
    "degrees",
    "size_of",
    "survivors",
]


Rounding = Literal["max", "nice"]


@dataclass(frozen=True)
class Policy:
    """How degrees are chosen, and what a rank may hold.

    Args:
        rounding: `"max"` uses every surviving rank. `"nice"` uses the fewest ranks that are as
            fast: 30 survivors with 128 heads become 26, since both have 5 heads on the busiest
            rank. The others are idle, the slowest first, and so is a rank that is so slow that
            it would hold the others up.
        rank_bytes: Bytes of split parameters, gradients and optimizer state on a rank at the full
            degree: those of each name of the units that are split, or one number, of which all
            count as those that grow most. 0 if `memory_limit` is 0.
        memory_limit: Bytes that these may take on any rank; 0 for no limit.
        drops_replicas: True to plan without a replica one of whose tensor-parallel groups has lost
            all ranks: its degree is 0, it gets no tokens, and what is left of it is idle. False
            makes that an error.

    Raises:
        ConfigError: An unknown rounding, negative bytes, or a limit without `rank_bytes`.
    """

    rounding: Rounding = "max"
    rank_bytes: int | Mapping[str, int] = 0
    memory_limit: int = 0
    drops_replicas: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            raise ConfigError(
                f"Policy: rounding={self.rounding!r}",
                found=f"known are {', '.join(get_args(Rounding))}",
                why="The rounding says how many of the surviving ranks are used.",
                fix=near_misses(self.rounding, get_args(Rounding)),
            )
        if not isinstance(self.rank_bytes, int):
            # Pairs, so that policies have a hash and a text of their own.
            object.__setattr__(self, "rank_bytes", tuple(sorted(dict(self.rank_bytes).items())))
        counts = [self.memory_limit, *(self.own_bytes.values() or [self.total_bytes])]
        are_counts = all(isinstance(one, int) and one >= 0 for one in counts)
        if not are_counts or (self.memory_limit > 0 and self.total_bytes == 0):
            raise ConfigError(
                "Policy: memory_limit",
                found=f"rank_bytes={self.rank_bytes}, memory_limit={self.memory_limit}",
                why="The bytes at a reduced degree are those at the full degree times the growth.",
                fix="Give rank_bytes of at least 1 with a limit, or neither.",
            )

    @property
    def own_bytes(self) -> dict[str, int]:
        """`rank_bytes` of each name; empty where they are one number."""
        return {} if isinstance(self.rank_bytes, int) else dict(self.rank_bytes)

    @property
    def total_bytes(self) -> int:
        """`rank_bytes` of all names together."""
        given = self.rank_bytes
        return given if isinstance(given, int) else sum(self.own_bytes.values())


# Coordinates of one tensor-parallel group: those on every axis but `tp`, in the order of names.
Domain = tuple[tuple[str, int], ...]


# A plan has a line for each replica; a job of more ranks is a mistake of writing.
_MOST_RANKS = 1 << 22


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


def size_of(topology: Topology, axis: str) -> int:
    """Size of an axis, 1 if the topology does not have it."""
    return topology.axes.get(axis, 1)


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
    _check_bytes(units, policy)
    if policy.memory_limit and policy.total_bytes > policy.memory_limit:
        raise LayoutError(
            f"plan: memory_limit={policy.memory_limit}",
            found=f"{policy.total_bytes} bytes on a rank without any failure",
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
            known[key] = _within_memory(units, own, chosen(kinds, own, full, policy), full, policy)
        if known[key] == 0:
            most = min(map(len, own))
            growth = memory_growth(units, combined(own, most), full, policy.own_bytes)
            raise LayoutError(
                f"plan: replica dp={replica}, stage pp={stage} at degree {most}",
                found=f"{_bytes(policy, growth)} bytes on a rank, {policy.memory_limit} allowed",
                why=f"A rank there holds up to {float(growth):.3f} times as much as one of {full}.",
                fix="Raise memory_limit, give rank_bytes by name if it is one number, shard the "
                "optimizer, recompute activations to free memory, or plan without replica "
                f"dp={replica}.",
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


def _check_bytes(units: Mapping[str, Units], policy: Policy) -> None:
    split = sorted(name for name, unit in units.items() if unit.is_split)
    if policy.own_bytes and sorted(policy.own_bytes) != split:
        raise ConfigError(
            "plan: rank_bytes",
            found=f"bytes of {sorted(policy.own_bytes)}, and split units of {split}",
            why="Each kind grows by itself where a rank holds more units, and all are added up.",
            fix="Give the bytes of each of these names and of no other, or one number.",
        )


def _within_memory(
    units: Mapping[str, Units], groups: Sequence[Form], degree: int, full: int, policy: Policy
) -> int:
    """The least degree from `degree` to that of all survivors that fits; 0 if none does."""
    if not policy.memory_limit:
        return degree
    for ranks in range(degree, min(map(len, groups)) + 1):
        growth = memory_growth(units, combined(groups, ranks), full, policy.own_bytes)
        if _bytes(policy, growth) <= policy.memory_limit:
            return ranks
    return 0


def _bytes(policy: Policy, growth: Fraction) -> int:
    return -(-policy.total_bytes * growth.numerator // growth.denominator)


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


@dataclass(frozen=True)
class FormTable:
    """Forms by stage, few of which differ.

    Args:
        slow_rates: Speeds of the ranks of a replica and stage in which a slow rank is used.
        forms: The distinct forms of each stage, ascending by degree, then by form.
        indices: The index in `forms` of each stage (first index) and replica (second index); -1 of
            a replica that is dropped.
    """

    slow_rates: Mapping[tuple[int, int], Form]
    forms: tuple[tuple[Form, ...], ...]
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, topology: Topology, degrees: Sequence[Sequence[int]], slow: RankSpeeds
    ) -> FormTable:
        """The forms of all groups of these degrees."""
        rates = _slow_rates(topology, degrees, slow) if slow else {}
        table, indices = [], []
        for stage in range(size_of(topology, "pp")):
            weighted = {at[0]: relative(own) for at, own in rates.items() if at[1] == stage}
            used = {own[stage] for replica, own in enumerate(degrees) if replica not in weighted}
            distinct = {*map(plain, used - {0}), *weighted.values()}
            forms = tuple(sorted(distinct, key=lambda form: (len(form), form)))
            by_degree = {len(form): index for index, form in enumerate(forms) if is_plain(form)}
            own = [by_degree.get(each[stage], -1) for each in degrees]
            for replica, form in weighted.items():
                own[replica] = forms.index(form)
            table.append(forms)
            indices.append(tuple(own))
        return cls(rates, tuple(table), tuple(indices))


def _slow_rates(
    topology: Topology, degrees: Sequence[Sequence[int]], slow: RankSpeeds
) -> dict[tuple[int, int], Form]:
    groups: dict[tuple[int, int], list[Form]] = {}
    for domain, rates in survivors(topology, slow).items():
        place = dict(domain)
        groups.setdefault((place["dp"], place.get("pp", 0)), []).append(rates)
    found = {
        (replica, stage): combined(own, degrees[replica][stage])
        for (replica, stage), own in groups.items()
        if degrees[replica][stage]
    }
    return {at: rates for at, rates in found.items() if min(rates) < 1}
