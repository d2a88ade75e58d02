"""`plan`: from a topology, failures and units to the degree and the ranges of every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

from pcomm.core.errors import ConfigError, LayoutError, TopologyError, near_misses
from pcomm.core.layout import Layout
from pcomm.core.topology import Topology
from pcomm.ntp.planning.cost import (
    Cost,
    PackingAdvice,
    ReplicaCost,
    changed_lines,
    first_lines,
    pack,
)
from pcomm.ntp.planning.cuts import (
    Form,
    RankSpeeds,
    Segment,
    SegmentGroup,
    fastest,
    is_plain,
    least_time_shares,
    plain,
    rank_speeds,
    segment_groups,
    segments,
)
from pcomm.ntp.planning.degrees import FormTable, Policy, check_topology, degrees, size_of
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan_json import VERSION, PlanSource, not_a_plan
from pcomm.ntp.planning.units import Units, find_units, memory_growth, relative_speed

__all__ = ["NtpPlan", "Place", "plan"]


@dataclass(frozen=True)
class Place:
    """The position of a surviving rank among the ranks that are used.

    Args:
        replica: Coordinate on `dp`.
        stage: Coordinate on `pp`, 0 without that axis.
        index: Position in its tensor-parallel group, counted from 0 over the ranks that are
            used; -1 if the rank is idle.
        degree: Number of ranks that are used in that group.
        is_idle: True for a rank that survived and has no units.
    """

    replica: int
    stage: int
    index: int
    degree: int
    is_idle: bool


def plan(
    topology: Topology,
    failures: Failures,
    units: Mapping[str, Units],
    policy: Policy = Policy(),  # noqa: B008 - frozen
    *,
    speeds: Mapping[int, float | Fraction] | None = None,
) -> NtpPlan:
    """Decide which degree and which units every rank has. Local; the same on all ranks.

    Args:
        topology: Axes `tp` and `dp`, and any others; `pp` counts stages. Its failed ranks count.
        failures: Further failed ranks.
        units: Units of parameters by name, or by a pattern of `fnmatch` such as `"*.qkv.weight"`.
            A pattern that matches nothing does no harm.
        policy: Rounding of degrees, and the limit on memory.
        speeds: Speed of each slow rank by global rank, relative to a healthy one: above 0 and at
            most 1. It gets fewer units in proportion. Those of failed ranks are left out. Round
            measured speeds, such as to tenths: ranks of equal speeds at equal places share cuts,
            and each further form of a group adds segments.

    Raises:
        ConfigError: A speed out of range.
        TopologyError: No `tp` or `dp`, more than 4 million ranks, an unknown failed rank, or a
            tensor-parallel group without any rank left, unless the policy drops its replica.
        LayoutError: More ranks than units, or a rank above the limit on memory.
        UnsupportedError: A topology with views.
    """
    check_topology(topology)
    damaged = topology.with_failed(failures.ranks(topology))
    slow = rank_speeds(damaged, speeds or {})
    named = tuple(sorted(units.items()))
    return NtpPlan(damaged, named, policy, degrees(damaged, slow, dict(named), policy), slow)


@dataclass(frozen=True)
class NtpPlan:
    """What every rank does after failures; made by `plan`, equal and of equal hash on all ranks.

    Args:
        topology: The topology, failed ranks included.
        units: Pairs of a name or pattern and its units, ascending by name.
        policy: The policy that chose the degrees.
        degrees: Tensor-parallel degree of each replica (first index) and stage (second index).
        rank_speeds: Pairs of a slow rank and its speed, ascending by rank.
    """

    topology: Topology
    units: tuple[tuple[str, Units], ...]
    policy: Policy
    degrees: tuple[tuple[int, ...], ...]
    rank_speeds: RankSpeeds = ()

    # -- who holds what ----------------------------------------------------------------------

    def degree(self, replica: int, stage: int = 0) -> int:
        """Tensor-parallel degree of a replica (`dp`) and stage (`pp`).

        Raises:
            TopologyError: No such replica or stage.
        """
        self._check_place(replica, stage)
        return self.degrees[replica][stage]

    def form(self, replica: int, stage: int = 0) -> Form:
        """Relative speeds of the ranks of a tensor-parallel group, the fastest being 1.

        It has one number for each rank that is used, all 1 unless ranks are slow. What ranks hold
        follows from the form: equal forms have equal layouts. A replica that is dropped has none.

        Raises:
            TopologyError: No such replica or stage.
        """
        if not self.degree(replica, stage):
            return ()
        return self._forms.forms[stage][self._forms.indices[stage][replica]]

    def rates(self, replica: int, stage: int = 0) -> Form:
        """Speeds of the ranks of a tensor-parallel group, a healthy rank having 1.

        Each is the least of its index in all groups of the place, such as those along `cp`.
        """
        return self._forms.slow_rates.get((replica, stage)) or plain(self.degree(replica, stage))

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

        It is the one of the largest degree, the full one if any has it; of these one without slow
        ranks, and the lowest.
        """
        return min(
            range(len(self.degrees)),
            key=lambda i: (-self.degrees[i][stage], (i, stage) in self._forms.slow_rates),
        )

    def units_of(self, parameter_name: str) -> tuple[str, Units] | None:
        """The key and the units of a parameter: its own name first, then a pattern that matches.

        Raises:
            ConfigError: Two patterns match and say different things.
        """
        return find_units(self.units, parameter_name)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks that are used in the tensor-parallel group at the place of `rank`.

        They are the fastest survivors, as many as the degree, ascending; of equal ones the lower.
        """
        place = self.topology.coordinates(rank)
        alive = self.topology.members(rank, "tp")
        degree = self.degrees[place["dp"]][place.get("pp", 0)]
        if degree == len(alive) or not self.rank_speeds:
            return alive[:degree]
        rates = [self._speed_of.get(one, Fraction(1)) for one in alive]
        return tuple(alive[i] for i in fastest(rates, degree))

    @cached_property
    def idle_ranks(self) -> tuple[int, ...]:
        """Surviving ranks that are not used, ascending."""
        full = self.topology.axes["tp"]
        idle: list[int] = []
        for replica, own in enumerate(self.degrees):
            for stage, degree in enumerate(own):
                if degree < full:
                    for place in self._group_places(replica, stage):
                        used = self.tensor_ranks(place)
                        idle += set(self.topology.members(place, "tp")).difference(used)
        return tuple(sorted(idle))

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """All used ranks of the stage of a rank, ascending; they hold whole parameters."""
        stage = self.topology.coordinates(rank).get("pp", 0)
        return tuple(sorted(one for _, own in self._tensor_groups(stage) for one in own))

    def layout(self, name: str, replica: int, stage: int = 0) -> Layout:
        """Positions of each rank of a tensor-parallel group, for the units `name`.

        Raises:
            ConfigError: No name or pattern of the plan matches.
            LayoutError: A replicated parameter, which is not split.
            TopologyError: No such replica or stage.
        """
        units = self._units(name)
        if units.is_split:
            return units.layout(self.form(replica, stage))
        raise LayoutError(
            f"Plan.layout: {name!r}",
            found="a replicated parameter",
            why="It is not split, so each rank holds all of it, whatever the degree.",
            fix="Take the whole tensor.",
        )

    def segments(self, name: str, stage: int = 0) -> tuple[Segment, ...]:
        """Ranges of units with one owner for each form of `stage`; none if replicated.

        Raises:
            ConfigError: No name or pattern of the plan matches.
            TopologyError: No such stage.
        """
        self._check_place(0, stage)
        units = self._units(name)
        if not units.is_split:
            return ()
        key = units.count, self._forms.forms[stage]
        if key not in self._segments:
            self._segments[key] = segments(*key)
        return self._segments[key]

    def groups(self, name: str, rank: int) -> tuple[SegmentGroup, ...]:
        """Groups that sum gradients of `name` in the stage of `rank`, ascending by units.

        They reach over all axes but `tp` and `pp`, since all of these hold the same parameters.
        """
        stage = self.topology.coordinates(rank).get("pp", 0)
        units = self._units(name)
        # Parameters of as many units have the same groups.
        key = units.count, stage
        if key not in self._groups:
            ranks = self._tensor_groups(stage)
            if units.is_split:
                self._groups[key] = segment_groups(self.segments(name, stage), ranks)
            else:
                every = sorted(rank for _, own in ranks for rank in own)
                self._groups[key] = (SegmentGroup(0, 0, tuple(every)),)
        return self._groups[key]

    # -- who computes how much ---------------------------------------------------------------

    @cached_property
    def speeds(self) -> tuple[Fraction, ...]:
        """Speed of each replica, that of its slowest stage; 1 at the full degree, 0 if dropped."""
        kinds, full = [units for _, units in self.units], self.topology.axes["tp"]
        used = {degree for own in self.degrees for degree in own if degree}
        by_degree = {degree: relative_speed(kinds, degree, full) for degree in used}
        by_degree[0] = Fraction(0)
        slow = {
            at: relative_speed(kinds, rates, full) for at, rates in self._forms.slow_rates.items()
        }
        return tuple(
            min(slow.get((replica, stage), by_degree[n]) for stage, n in enumerate(own))
            for replica, own in enumerate(self.degrees)
        )

    def token_shares(self, tokens: int, *, multiple: int = 1) -> tuple[int, ...]:
        """Tokens of each replica in a step, `tokens` in all: the slowest ends as early as can be.

        Shares are proportional to the speeds, but for rounding.

        Args:
            tokens: Tokens of the global batch.
            multiple: Tokens that stay together, such as the length of a sequence.

        Raises:
            ConfigError: `tokens` is no multiple of `multiple`, or too few for all replicas.
        """
        replicas = sum(speed > 0 for speed in self.speeds)
        if multiple < 1 or tokens % multiple or tokens // multiple < replicas:
            raise ConfigError(
                f"Plan.token_shares: {tokens} tokens in multiples of {multiple}",
                found=f"{replicas} replicas",
                why="The batch is handed out in whole multiples, to each replica at least one.",
                fix="Use a larger batch that is a multiple, or smaller multiples.",
            )
        return tuple(n * multiple for n in least_time_shares(tokens // multiple, self.speeds))

    @cached_property
    def packing(self) -> PackingAdvice:
        """Advice for the next restart; see `PackingAdvice`."""
        kinds = [units for _, units in self.units]
        return pack(self.topology, self.rank_speeds, kinds, self.policy)

    def cost(self) -> Cost:
        """Speed, memory and groups of the job; predictions from counts of units."""
        topology = self.topology
        full, stages = topology.axes["tp"], size_of(topology, "pp")
        inner = topology.world_size // (full * stages * len(self.degrees))
        lost = Counter(topology.coordinates(rank)["dp"] for rank in topology.failed)
        slow = {topology.coordinates(rank)["dp"] for rank, _ in self.rank_speeds}
        split = [(name, units) for name, units in self.units if units.is_split]
        # Most replicas are changed alike.
        known: dict[int | Form, tuple[Fraction, str, Fraction]] = {}

        def uneven(replica: int, stage: int) -> tuple[Fraction, str, Fraction]:
            """Least efficiency of a cut, the name of its units, and the growth of memory."""
            rates = self.rates(replica, stage)
            over: int | Form = len(rates) if is_plain(rates) and rates[0] == 1 else rates
            if over not in known:
                found = ((units.efficiency(over), name) for name, units in split)
                least = min(found, default=(Fraction(1), ""))
                own = self.policy.own_bytes
                known[over] = (*least, memory_growth(dict(split), over, full, own))
            return known[over]

        changed = []
        for replica, own in enumerate(self.degrees):
            if min(own) == full and replica not in slow:
                continue
            found = [uneven(replica, stage) for stage in range(stages) if own[stage]]
            found = found or [(Fraction(0), "", Fraction(0))]
            efficiency, name, _ = min(found)
            changed.append(
                ReplicaCost(
                    replica=replica,
                    degrees=own,
                    forms=tuple(self.form(replica, stage) for stage in range(stages)),
                    idle=inner * (full * stages - sum(own)) - lost[replica],
                    speed=self.speeds[replica],
                    efficiency=efficiency,
                    uneven=name if efficiency < 1 else "",
                    memory_growth=max(growth for _, _, growth in found),
                )
            )
        throughput = sum(self.speeds, Fraction(0)) / len(self.speeds)
        slowness = sum((1 - speed for _, speed in self.rank_speeds), Fraction(0))
        left = topology.world_size - len(topology.failed) - slowness
        counts = [len(self.segments(name, stage)) for name, _ in split for stage in range(stages)]
        ratio = throughput * topology.world_size / left
        return Cost(tuple(changed), throughput, ratio, max(counts, default=0))

    # -- what it says ------------------------------------------------------------------------

    def explain(
        self,
        *,
        copies: int | None = None,
        hosts: Mapping[int, str] | None = None,
        rank_parameters: int = 0,
    ) -> str:
        """Text for people: degrees, slow ranks, costs and advice.

        Args:
            copies: As `Session` takes it; None says nothing of owners.
            hosts: As `Session` takes it.
            rank_parameters: Number of parameters of a rank at the full degree, for the bytes of
                AdamW's averages and of a step, all in fp32; 0 for shares alone.
        """
        cost, topology, slow = self.cost(), self.topology, self.rank_speeds

        def slow_line(pair: tuple[int, Fraction]) -> str:
            rank, speed = pair
            at = self.place(rank)
            form = self.form(at.replica, at.stage)
            held = ", ".join(
                f"{name} {units.sizes(form)[at.index]} of {units.count} units"
                for name, units in self.units
                if units.is_split and not at.is_idle
            )
            where = Coord(**topology.coordinates(rank))
            use = "idle" if at.is_idle else held or "used"
            return f"rank {rank} ({where}): speed {float(speed):.3f}, {use}"

        def units_line(pair: tuple[str, Units]) -> str:
            name, units = pair
            most = max(len(self.segments(name, stage)) for stage in range(size_of(topology, "pp")))
            how = f"{most} segments" if units.is_split else "all ranks together"
            return f"{name}: {units.kind}, {units.count} units, {how}"

        lines = [
            f"{topology.world_size} ranks, {len(topology.failed)} failed"
            + (f" and {len(slow)} slow, " if slow else ", ")
            + f"{len(cost.replicas)} of {len(self.degrees)} replicas "
            + ("changed" if slow else "at a reduced degree"),
            f"throughput {float(cost.throughput):.4f} of a whole job, "
            f"{float(cost.ratio_to_ideal):.4f} of the ranks' that are left (predicted)",
            *changed_lines(cost.replicas),
            *first_lines(slow, slow_line, "slow ranks"),
            *map(units_line, self.units),
        ]
        advice = self.packing
        if advice.swaps:
            gain = float(advice.speed_after - advice.speed_before)
            lines.append(f"at the next restart, swap for {gain:.3f} replicas more of speed:")
            lines += first_lines(advice.swaps, lambda swap: f"  {swap}", "swaps")
        if copies is not None:
            lines += self._copies_lines(copies, hosts, rank_parameters)
        return "\n".join(lines)

    def _copies_lines(
        self, copies: int, hosts: Mapping[int, str] | None, rank_parameters: int
    ) -> list[str]:
        """What owners of the optimizer's state cost, and which deaths cost no step."""
        groups = self._tensor_groups(0)
        place = self.topology.coordinates
        used = [rank for _, own in groups for rank in own]
        names = {place(one)["dp"] if hosts is None else hosts[one] for one in used}
        kept, holders = min(copies, len(names)), len(groups)
        lines = [
            f"optimizer state: {kept} of {holders} ranks that hold a unit own it, so a rank keeps "
            f"{kept / holders:.3f} of what it would have"
        ]
        if rank_parameters:
            state, weights = 8 * rank_parameters, 4 * rank_parameters
            part = weights * (holders - 1) // holders
            lines.append(
                f"AdamW in fp32: {state * kept // holders} bytes a rank instead of {state}; a step "
                f"sends {3 * part} bytes a rank instead of {2 * part}"
            )
        survived = "none: back to the checkpoint" if kept == 1 else f"any {kept - 1}"
        lines.append(f"hosts that may die at once: {survived}")
        if kept < copies:
            lines.append(
                f"warning: {len(names)} hosts for {copies} copies, so the death of any "
                f"{copies - 1} hosts is no longer survived"
            )
        return lines

    def agreed_lines(self) -> list[str]:
        """Facts that all ranks must share, one field a line, for `Control.agree` and others."""
        topology = self.topology
        return [
            f"version: {VERSION}",
            f"topology: {Topology(topology.axes, topology.order).describe()}",
            f"offset: {topology.offset}",
            f"failed: {sorted(topology.failed)}",
            *(f"speed of rank {rank}: {speed}" for rank, speed in self.rank_speeds),
            *(f"policy.{key}: {value}" for key, value in asdict(self.policy).items()),
            *(f"units of {name}: {units}" for name, units in self.units),
            *(
                f"degrees of dp={replica}: {own}"
                for replica, own in enumerate(self.degrees)
                if min(own) < topology.axes["tp"]
            ),
        ]

    def digest(self) -> str:
        """32 hexadecimal digits of `agreed_lines`; equal in every process for equal plans."""
        text = "\n".join(self.agreed_lines()).encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def to_json(self) -> str:
        """JSON text that `from_json` reads: what the plan was made from, and its digest."""
        return PlanSource(
            self.topology,
            Failures.from_global_ranks(sorted(self.topology.failed)),
            dict(self.units),
            self.policy,
            dict(self.rank_speeds),
            self.digest(),
        ).to_json()

    @classmethod
    def from_json(cls, text: str) -> NtpPlan:
        """Make the plan again from the text of `to_json`.

        Raises:
            ConfigError: Text of another form or version, or a plan that is another one than when
                the text was written.
        """
        source = PlanSource.from_json(text)
        made = plan(
            source.topology, source.failures, source.units, source.policy, speeds=source.speeds
        )
        if made.digest() != source.digest:
            raise not_a_plan(f"digest {source.digest}, the plan made from it has {made.digest()}")
        return made

    # -- how it is done ----------------------------------------------------------------------

    def _check_place(self, replica: int, stage: int) -> None:
        replicas, stages = len(self.degrees), len(self.degrees[0])
        if not (0 <= replica < replicas and 0 <= stage < stages):
            raise TopologyError(
                f"Plan: replica {replica}, stage {stage}",
                found=f"{replicas} replicas, {stages} stages",
                why="Replicas are the coordinates on 'dp' and stages those on 'pp', from 0.",
                fix=f"Use a replica from 0 to {replicas - 1} and a stage from 0 to {stages - 1}.",
            )

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

    def _group_places(self, replica: int, stage: int) -> list[int]:
        """A rank of each tensor-parallel group of a replica and stage."""
        axes = self.topology.axes
        at = {"tp": range(1), "dp": range(replica, replica + 1), "pp": range(stage, stage + 1)}
        places = product(*(at.get(axis, range(size)) for axis, size in axes.items()))
        return [self.topology.rank(dict(zip(axes, place, strict=True))) for place in places]

    def _tensor_groups(self, stage: int) -> list[tuple[int, tuple[int, ...]]]:
        """The index of its form, and the ranks that are used, of each group of a stage."""
        return [
            (form, self.tensor_ranks(place))
            for replica, form in enumerate(self._forms.indices[stage])
            if form >= 0
            for place in self._group_places(replica, stage)
        ]

    @cached_property
    def _groups(self) -> dict[tuple[int, int], tuple[SegmentGroup, ...]]:
        return {}

    @cached_property
    def _segments(self) -> dict[tuple[int, tuple[Form, ...]], tuple[Segment, ...]]:
        return {}

    @cached_property
    def _speed_of(self) -> dict[int, Fraction]:
        return dict(self.rank_speeds)

    @cached_property
    def _forms(self) -> FormTable:
        return FormTable.of(self.topology, self.degrees, self.rank_speeds)
