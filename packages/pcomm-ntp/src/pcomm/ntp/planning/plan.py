"""`plan`: from a topology, failures and units to the degree and the ranges of every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

from pcomm.core.errors import ConfigError, LayoutError, TopologyError, near_misses
from pcomm.core.layout import Layout
from pcomm.core.topology import Topology
from pcomm.ntp.planning.cost import Cost, ReplicaCost
from pcomm.ntp.planning.degrees import check_topology, degrees, relative_speed, size_of
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.forms import Form
from pcomm.ntp.planning.packing import Packing, pack
from pcomm.ntp.planning.patterns import find_units
from pcomm.ntp.planning.place import Place
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.segments import Segment, segments
from pcomm.ntp.planning.shares import largest_remainder
from pcomm.ntp.planning.units import Units

__all__ = ["Plan", "SegmentGroup", "plan"]

_VERSION = 1


@dataclass(frozen=True)
class SegmentGroup:
    """Ranks whose gradients of one range of units are summed.

    Args:
        start: First unit; 0 for a replicated parameter.
        stop: The unit after the last one; 0 for a replicated parameter.
        ranks: Global ranks, ascending: the owner of the range in each tensor-parallel group, or
            all ranks of all groups for a replicated parameter.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What every rank does after failures; made by `plan`, equal and of equal hash on all ranks.

    Args:
        topology: The topology, failed ranks included.
        units: Pairs of a name or pattern and its units, ascending by name.
        policy: The policy that chose the degrees.
        degrees: Tensor-parallel degree of each replica (first index) and stage (second index).
    """

    topology: Topology
    units: tuple[tuple[str, Units], ...]
    policy: Policy
    degrees: tuple[tuple[int, ...], ...]

    # -- who holds what ----------------------------------------------------------------------

    def degree(self, replica: int, stage: int = 0) -> int:
        """Tensor-parallel degree of a replica (`dp`) and stage (`pp`)."""
        return self.degrees[replica][stage]

    def form(self, replica: int, stage: int = 0) -> Form:
        """Relative speeds of the ranks of a tensor-parallel group, the fastest being 1.

        One number for each rank that is used; all 1 unless ranks are slow. What ranks hold
        follows from the form: equal forms have equal layouts.
        """
        return (Fraction(1),) * self.degree(replica, stage)

    def place(self, rank: int) -> Place:
        """Where a surviving rank stands: replica, stage, and index in its group.

        Raises:
            TopologyError: A rank that has failed, or that the topology does not have.
        """
        coordinates = self.topology.coordinates(rank)
        if rank in self.topology.failed:
            raise TopologyError(
                f"Plan.place: rank {rank}",
                found=f"rank {rank} has failed ({Coord(**coordinates)})",
                why="Only ranks that survived have a place.",
                fix="Ask for another rank, or make a plan in which this one is back.",
            )
        used = self.tensor_ranks(rank)
        is_idle = rank not in used
        index = -1 if is_idle else used.index(rank)
        return Place(coordinates["dp"], coordinates.get("pp", 0), index, len(used), is_idle)

    def canonical_replica(self, stage: int = 0) -> int:
        """The replica that speaks for all in `stage`, such as for norms and checkpoints.

        The one of the largest degree, the full one if any has it; of these the lowest.
        """
        return min(range(len(self.degrees)), key=lambda replica: -self.degrees[replica][stage])

    def units_of(self, parameter_name: str) -> tuple[str, Units] | None:
        """The key and the units of a parameter: its own name first, then a pattern that matches.

        Raises:
            ConfigError: Two patterns match and say different things.
        """
        return find_units(self.units, parameter_name)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks that are used in the tensor-parallel group at the place of `rank`.

        The surviving ones, ascending on `tp`, as many as the degree.
        """
        place = self.topology.coordinates(rank)
        alive = self.topology.members(rank, "tp")
        return alive[: self.degrees[place["dp"]][place.get("pp", 0)]]

    @cached_property
    def idle_ranks(self) -> tuple[int, ...]:
        """Surviving ranks that are not used, ascending."""
        full = self.topology.axes["tp"]
        idle: list[int] = []
        inner = [axis for axis in self.topology.axes if axis not in ("tp", "dp", "pp")]
        for replica, own in enumerate(self.degrees):
            for stage, degree in enumerate(own):
                if degree < full:
                    for rank in self._group_places(replica, stage, inner):
                        idle += self.topology.members(rank, "tp")[degree:]
        return tuple(sorted(idle))

    def layout(self, name: str, replica: int, stage: int = 0) -> Layout:
        """Positions of each rank of a tensor-parallel group, for the units `name`."""
        degree, units = self.degree(replica, stage), self._units(name)
        if units.is_split:
            return units.layout(degree)
        raise LayoutError(
            f"Plan.layout: {name!r}",
            found="a replicated parameter",
            why="It is not split, so each rank holds all of it, whatever the degree.",
            fix="Take the whole tensor.",
        )

    def segments(self, name: str, stage: int = 0) -> tuple[Segment, ...]:
        """Ranges of units with one owner for each degree of `stage`; none if replicated."""
        units = self._units(name)
        if not units.is_split:
            return ()
        key = units.count, tuple(sorted({own[stage] for own in self.degrees}))
        if key not in self._segments:
            self._segments[key] = segments(*key)
        return self._segments[key]

    def groups(self, name: str, rank: int) -> tuple[SegmentGroup, ...]:
        """Groups that sum gradients of `name` in the stage of `rank`, ascending by units.

        They reach over all axes but `tp` and `pp`, since all of these hold the same parameters.
        """
        stage = self.topology.coordinates(rank).get("pp", 0)
        inner = [axis for axis in self.topology.axes if axis not in ("tp", "dp", "pp")]
        groups = [
            (self.degrees[replica][stage], self.tensor_ranks(place))
            for replica in range(len(self.degrees))
            for place in self._group_places(replica, stage, inner)
        ]
        if not self._units(name).is_split:
            return (SegmentGroup(0, 0, tuple(sorted(r for _, own in groups for r in own))),)
        found = []
        for segment in self.segments(name, stage):
            owners = dict(segment.owners)
            ranks = sorted(own[owners[degree]] for degree, own in groups)
            found.append(SegmentGroup(segment.start, segment.stop, tuple(ranks)))
        return tuple(found)

    # -- who computes how much ---------------------------------------------------------------

    @cached_property
    def speeds(self) -> tuple[Fraction, ...]:
        """Speed of each replica, that of its slowest stage; 1 at the full degree."""
        kinds, full = [units for _, units in self.units], self.topology.axes["tp"]
        used = {degree for own in self.degrees for degree in own}
        by_degree = {degree: relative_speed(kinds, degree, full) for degree in used}
        return tuple(min(by_degree[degree] for degree in own) for own in self.degrees)

    def token_shares(self, tokens: int, *, multiple: int = 1) -> tuple[int, ...]:
        """Tokens of each replica in a step: proportional to the speeds, `tokens` in all.

        Args:
            tokens: Tokens of the global batch.
            multiple: Tokens that stay together, such as the length of a sequence.

        Raises:
            ConfigError: `tokens` is no multiple of `multiple`, or too few for all replicas.
        """
        if multiple < 1 or tokens % multiple or tokens // multiple < len(self.degrees):
            raise ConfigError(
                f"Plan.token_shares: {tokens} tokens in multiples of {multiple}",
                found=f"{len(self.degrees)} replicas",
                why="The batch is handed out in whole multiples, to each replica at least one.",
                fix="Use a larger batch that is a multiple, or smaller multiples.",
            )
        # One for each first, or the slowest could be left without any.
        spare = tokens // multiple - len(self.degrees)
        each = tokens // multiple / sum(self.speeds, Fraction(0))
        exact = [speed * each - 1 for speed in self.speeds]
        handed = (
            largest_remainder(spare, [max(share, Fraction(0)) for share in exact]) if spare else ()
        )
        return tuple((n + 1) * multiple for n in handed or (0,) * len(self.degrees))

    @cached_property
    def packing(self) -> Packing:
        """Advice for the next restart; see `Packing`."""
        return pack(self.topology, [units for _, units in self.units], self.policy)

    def cost(self) -> Cost:
        """Speed, memory and groups of the job; predictions from counts of units."""
        full, stages = self.topology.axes["tp"], size_of(self.topology, "pp")
        inner = self.topology.world_size // (full * stages * len(self.degrees))
        alive_lost: dict[int, int] = {}
        for rank in self.topology.failed:
            replica = self.topology.coordinates(rank)["dp"]
            alive_lost[replica] = alive_lost.get(replica, 0) + 1
        split = [(name, units) for name, units in self.units if units.is_split]
        reduced = []
        for replica, own in enumerate(self.degrees):
            if min(own) == full:
                continue
            least = min(((u.efficiency(n), name) for name, u in split for n in own), default=None)
            efficiency, uneven = least or (Fraction(1), "")
            grown = [Fraction(u.most_units(n), u.most_units(full)) for _, u in split for n in own]
            unused = inner * (full * stages - sum(own)) - alive_lost.get(replica, 0)
            reduced.append(
                ReplicaCost(
                    replica,
                    own,
                    unused,
                    self.speeds[replica],
                    efficiency,
                    uneven if efficiency < 1 else "",
                    max(grown, default=Fraction(1)),
                )
            )
        throughput = sum(self.speeds, Fraction(0)) / len(self.speeds)
        left = Fraction(self.topology.world_size - len(self.topology.failed))
        counts = [len(self.segments(name, s)) for name, _ in split for s in range(stages)]
        ratio = throughput * self.topology.world_size / left
        return Cost(tuple(reduced), throughput, ratio, max(counts, default=0))

    # -- what it says ------------------------------------------------------------------------

    def explain(self) -> str:
        """Text for people: degrees, costs and advice."""
        cost, topology = self.cost(), self.topology
        lines = [
            f"{topology.world_size} ranks, {len(topology.failed)} failed, "
            f"{len(cost.replicas)} of {len(self.degrees)} replicas at a reduced degree",
            f"throughput {float(cost.throughput):.4f} of a whole job, "
            f"{float(cost.ratio_to_ideal):.4f} of the ranks' that are left (predicted)",
        ]
        for one in cost.replicas:
            why = f", {one.uneven} cut with efficiency {float(one.efficiency):.3f}"
            lines.append(
                f"dp={one.replica}: tp {'/'.join(map(str, one.degrees))}, speed "
                f"{float(one.speed):.3f}, memory x{float(one.memory_growth):.3f}, "
                f"{one.idle} idle{why if one.uneven else ''}"
            )
        for name, units in self.units:
            how = f"{len(self.segments(name))} segments" if units.is_split else "all ranks together"
            lines.append(f"{name}: {units.kind}, {units.count} units, {how}")
        advice = self.packing
        if advice.swaps:
            gain = float(advice.speed_after - advice.speed_before)
            lines.append(f"at the next restart, swap for {gain:.3f} replicas more of speed:")
            lines += [f"  {swap}" for swap in advice.swaps]
        return "\n".join(lines)

    def agreed_lines(self) -> list[str]:
        """Facts that all ranks must share, one field a line, for `Control.agree_on_lines`."""
        reduced = {
            f"degrees of dp={replica}": own
            for replica, own in enumerate(self.degrees)
            if min(own) < self.topology.axes["tp"]
        }
        return [
            f"version: {_VERSION}",
            f"topology: {Topology(self.topology.axes, self.topology.order).describe()}",
            f"offset: {self.topology.offset}",
            f"failed: {sorted(self.topology.failed)}",
            *(f"policy.{key}: {value}" for key, value in asdict(self.policy).items()),
            *(f"units of {name}: {units}" for name, units in self.units),
            *(f"{name}: {own}" for name, own in reduced.items()),
        ]

    def digest(self) -> str:
        """32 hexadecimal digits of `agreed_lines`; equal in every process for equal plans."""
        text = "\n".join(self.agreed_lines()).encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def to_json(self) -> str:
        """JSON text that `from_json` reads: what the plan was made from, and its digest."""
        topology = self.topology
        return json.dumps(
            {
                "version": _VERSION,
                "axes": dict(topology.axes),
                "order": topology.order,
                "offset": topology.offset,
                "failed": sorted(topology.failed),
                "policy": asdict(self.policy),
                "units": {name: asdict(units) for name, units in self.units},
                "digest": self.digest(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Make the plan again from the text of `to_json`.

        Raises:
            ConfigError: Text of another form or version, or a plan that is another one than when
                the text was written.
        """
        try:
            found = json.loads(text)
            if found["version"] != _VERSION:
                raise _not_a_plan(f"version {found['version']}, this is version {_VERSION}")
            topology = Topology(found["axes"], found["order"], offset=found["offset"])
            units = {
                name: Units(one["kind"], one["count"], tuple(one["sections"]), one["work"])
                for name, one in found["units"].items()
            }
            failures = Failures.from_global_ranks(found["failed"])
            made = plan(topology, failures, units, Policy(**found["policy"]))
            digest = found["digest"]
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise _not_a_plan(f"{type(error).__name__}: {error}") from error
        if made.digest() != digest:
            raise _not_a_plan(f"digest {digest}, the plan made from it has {made.digest()}")
        return made

    # -- how it is done ----------------------------------------------------------------------

    def _units(self, name: str) -> Units:
        found = self.units_of(name)
        if found is None:
            raise ConfigError(
                f"Plan: units {name!r}",
                found=f"{len(self.units)} names and patterns, none of which matches",
                why="Units are looked up by the names and patterns that the plan was made with.",
                fix=near_misses(name, dict(self.units)),
            )
        return found[1]

    def _group_places(self, replica: int, stage: int, inner: Sequence[str]) -> list[int]:
        """A rank of each tensor-parallel group of a replica and stage."""
        fixed = {"tp": 0, "dp": replica, **({"pp": stage} if "pp" in self.topology.axes else {})}
        places = product(*(range(self.topology.axes[axis]) for axis in inner))
        return [
            self.topology.rank({**fixed, **dict(zip(inner, place, strict=True))})
            for place in places
        ]

    @cached_property
    def _segments(self) -> dict[tuple[int, tuple[int, ...]], tuple[Segment, ...]]:
        return {}


def plan(
    topology: Topology,
    failures: Failures,
    units: Mapping[str, Units],
    policy: Policy = Policy(),  # noqa: B008 - frozen
) -> Plan:
    """Decide which degree and which units every rank has. Local; the same on all ranks.

    Args:
        topology: Axes `tp` and `dp`, and any others; `pp` counts stages. Its failed ranks count.
        failures: Further failed ranks.
        units: Units of parameters by name, or by a pattern of `fnmatch` such as `"*.qkv.weight"`.
            A pattern that matches nothing does no harm.
        policy: Rounding of degrees, and the limit on memory.

    Raises:
        TopologyError: No `tp` or `dp`, an unknown failed rank, or a tensor-parallel group without
            any rank left.
        LayoutError: More ranks than units, or a rank above the limit on memory.
        UnsupportedError: A topology with views.
    """
    check_topology(topology)
    damaged = topology.with_failed(failures.ranks(topology))
    named = tuple(sorted(units.items()))
    return Plan(damaged, named, policy, degrees(damaged, dict(named), policy))


def _not_a_plan(found: str) -> ConfigError:
    return ConfigError(
        "Plan.from_json",
        found=found,
        why="The text has what a plan was made from, and the digest shows that it is the same.",
        fix="Write it again by Plan.to_json with this version.",
    )
