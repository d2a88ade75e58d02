"""Which units of a parameter go from which rank to which when a plan follows another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.cuts import cuts
from pcomm.ntp.planning.owners import Intervals, Owners, merged
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units

__all__ = [
    "Interval",
    "Move",
    "OwnedState",
    "StateLostError",
    "check_same_job",
    "held_units",
    "level_senders",
    "moves",
    "split_units",
]


class StateLostError(PcommError):
    """No rank that is left holds some units; names the parameter, units, and ranks that had them.

    A checkpoint is the only place where they still are.
    """


class Move(NamedTuple):
    """Units `start` to `stop - 1` of a parameter, sent from one rank to another.

    Attributes:
        source: Global rank that sends them; it holds them under the old plan.
        target: Global rank that gets them; it needs them under the new plan, and lacks them.
        start: First unit. A replicated parameter is the one unit 0.
        stop: The unit after the last one.
    """

    source: int
    target: int
    start: int
    stop: int


def moves(
    old: NtpPlan, new: NtpPlan, name: str, *, holders: Collection[int], stage: int | None = None
) -> tuple[Move, ...]:
    """What has to be sent so that every rank of `new` has its units of a parameter. Local, pure.

    Each rank gets exactly the units that it lacks, each from one rank: from its own
    tensor-parallel group where one is left that has them, and otherwise from all replicas in
    equal amounts. Ranks that pass the same arguments get the same.

    Args:
        old: Plan under which the state lies now.
        new: Plan that follows, of the same topology and units.
        name: Name of the parameter, or of its units in the plans.
        holders: Ranks that are alive and have the state of `old`. Neither newcomers, whose rank
            was gone, nor failed ranks are among them.
        stage: Pipeline stage to which the answer is limited; all stages by default.

    Returns:
        The moves, ascending by target and units.

    Raises:
        ConfigError: Plans of different topologies or units.
        StateLostError: No holder has some units that a rank lacks.
    """
    check_same_job(old, new)
    units = split_units(old, name)
    alive = frozenset(holders)
    found: list[Move] = []
    for number, groups in whole_groups(old.topology).items():
        if stage is None or number == stage:
            had = [held_by_group(old, units, group) for group in groups]
            wanted = [held_by_group(new, units, group) for group in groups]
            found += _moves_of_stage(name, had, wanted, alive)
    return tuple(sorted(found, key=lambda move: (move.target, move.start)))


@dataclass(frozen=True, eq=False)
class OwnedState:
    """Optimizer state that is not with every rank that holds the weights, under two plans.

    Args:
        old: Owners under the old plan.
        new: Owners under the new plan.
        whole: Ranks of `old` whose weights are all those after the last step. Others have applied
            it to the units that they own, and not got the rest.
    """

    old: Owners
    new: Owners
    whole: Collection[int]

    def covers(self, parameter: str) -> bool:
        """Whether the state of a parameter has owners."""
        return parameter in self.new.sizes

    def moves(
        self,
        old: NtpPlan,
        new: NtpPlan,
        parameter: str,
        *,
        is_state: bool,
        holders: Collection[int],
        stage: int,
    ) -> tuple[Move, ...]:
        """What has to be sent of a parameter that has owners, or of its state; see `moves`.

        Raises:
            StateLostError: No holder has the newest numbers of some units.
        """
        groups = whole_groups(old.topology)[stage]
        alive = frozenset(holders)
        had = [
            {
                rank: self.newest(old, parameter, rank, is_state=is_state)
                for rank in old.tensor_ranks(group.lowest)
            }
            for group in groups
        ]
        wanted = [
            {
                rank: self.needed(new, parameter, rank, is_state=is_state)
                for rank in new.tensor_ranks(group.lowest)
            }
            for group in groups
        ]
        found = _moves_of_stage(parameter, had, wanted, alive)
        return tuple(sorted(found, key=lambda move: (move.target, move.start)))

    def newest(self, old: NtpPlan, parameter: str, rank: int, *, is_state: bool) -> Intervals:
        """Units of which a rank has the newest numbers under the old plan."""
        if is_state or rank not in self.whole:
            return self.old.held(parameter, rank)
        return self.extent(old, parameter, rank)

    def needed(self, new: NtpPlan, parameter: str, rank: int, *, is_state: bool) -> Intervals:
        """Units that a rank has under the new plan."""
        if is_state:
            return self.new.held(parameter, rank)
        return self.extent(new, parameter, rank)

    def units(self, plan: NtpPlan, parameter: str) -> Units:
        """Units of a parameter; the positions of one that each rank holds whole."""
        return split_units(plan, parameter) or Units.columns(self.new.sizes[parameter].units)

    def extent(self, plan: NtpPlan, parameter: str, rank: int) -> Intervals:
        """Units of the weights of a rank; none if it is idle or has failed."""
        units = split_units(plan, parameter)
        found = held_units(plan, units, rank)
        if found is None:
            return ()
        return merged([found if units is not None else (0, self.new.sizes[parameter].units)])


def split_units(plan: NtpPlan, name: str) -> Units | None:
    """The units of a split parameter; None if it is replicated, or the plan does not name it."""
    found = plan.units_of(name)
    return found[1] if found is not None and found[1].is_split else None


def check_same_job(old: NtpPlan, new: NtpPlan) -> None:
    """Raise `ConfigError` unless both plans are of the same topology, failures apart, and units."""
    for field, one, other in (
        ("axes", dict(old.topology.axes), dict(new.topology.axes)),
        ("order", old.topology.order, new.topology.order),
        ("offset", old.topology.offset, new.topology.offset),
        ("units", dict(old.units), dict(new.units)),
    ):
        if one != other:
            raise ConfigError(
                f"redistribute: {field} of two plans",
                found=f"{one} in the old plan, {other} in the new one",
                why="Ranks keep their coordinates for life, and parameters their units: only "
                "failures, speeds and degrees differ from plan to plan.",
                fix="Make both plans from one topology and the same units.",
            )


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


def held_by_group(plan: NtpPlan, units: Units | None, group: WholeGroup) -> dict[int, Intervals]:
    """The units of each rank that is used in a group, by global rank.

    Args:
        plan: Plan that is in force.
        units: Units of the parameter; None if it has none and is replicated.
        group: One of `whole_groups`.
    """
    used = plan.tensor_ranks(group.lowest)
    if not used or units is None or not units.is_split:
        return dict.fromkeys(used, ((0, 1),))
    own = cuts(units.count, plan.form(group.replica, group.stage))
    return {rank: (one,) for rank, one in zip(used, pairwise(own), strict=True)}


def held_units(plan: NtpPlan, units: Units | None, rank: int) -> Interval | None:
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


def _moves_of_stage(
    name: str,
    had: Sequence[Mapping[int, Intervals]],
    wanted: Sequence[Mapping[int, Intervals]],
    alive: frozenset[int],
) -> Iterator[Move]:
    """Moves inside a stage, of what ranks had and what they want in each tensor-parallel group."""
    has = [{rank: own for rank, own in ranks.items() if rank in alive} for ranks in had]
    loads: dict[int, int] = {}
    # Parameters of equal units would otherwise all prefer the same senders.
    turn = crc32(name.encode())
    afar: list[tuple[int, Interval]] = []
    for near, targets in zip(has, wanted, strict=True):
        for target, own in targets.items():
            for interval in lacking(own, near.get(target, ())):
                for piece, ranks in split_by_holder(interval, near):
                    if ranks:
                        yield from _sent(target, piece, ranks, loads, turn)
                    else:
                        afar.append((target, piece))
    if not afar:
        return
    everyone = {rank: own for ranks in has for rank, own in ranks.items()}
    cut = [(target, *piece) for target, own in afar for piece in split_by_holder(own, everyone)]
    for _, piece, ranks in cut:
        if not ranks:
            raise _lost(name, piece, {r: own for one in had for r, own in one.items()})
    turned = [(target, piece, _turned(ranks, turn)) for target, piece, ranks in cut]
    for target, dealt in balance_senders(turned, loads):
        for source, (start, stop) in dealt:
            yield Move(source, target, start, stop)


def _sent(
    target: int, interval: Interval, ranks: list[int], loads: dict[int, int], turn: int
) -> Iterator[Move]:
    for source, (start, stop) in level_senders(interval, _turned(ranks, turn), loads):
        yield Move(source, target, start, stop)


def _turned(ranks: list[int], turn: int) -> list[int]:
    first = turn % len(ranks)
    return ranks[first:] + ranks[:first]


def _lost(name: str, interval: Interval, had: dict[int, Intervals]) -> StateLostError:
    start, stop = interval
    ranks = sorted(r for r, own in had.items() if any(a < stop and start < b for a, b in own))
    return StateLostError(
        f"redistribute: {name!r}, units {start} to {stop - 1}",
        found=f"ranks {ranks} had them, and none of these is left with its state",
        why="State comes from ranks that live; in no replica did one survive that has these units.",
        fix="Load a checkpoint in the new plan on all ranks, as Session does with restore.",
    )


def lacking(wanted: Intervals, held: Intervals) -> list[Interval]:
    """What of `wanted` is not in `held`, ascending."""
    found = []
    for start, stop in wanted:
        for first, last in held:
            if first < stop and start < last:
                if start < first:
                    found.append((start, first))
                start = last
        if start < stop:
            found.append((start, stop))
    return found


def split_by_holder(
    wanted: Interval, held: Mapping[int, Intervals]
) -> list[tuple[Interval, list[int]]]:
    """`wanted`, cut wherever the holders change, with the ranks that hold each piece."""
    start, stop = wanted
    inside = {(r, max(a, start), min(b, stop)) for r, own in held.items() for a, b in own}
    overlaps = [(r, a, b) for r, a, b in inside if a < b]
    edges = sorted({start, stop, *(x for _, a, b in overlaps for x in (a, b))})
    return [
        ((first, last), sorted(r for r, a, b in overlaps if a <= first and last <= b))
        for first, last in pairwise(edges)
    ]


def level_senders(
    interval: Interval, candidates: Sequence[int], loads: dict[int, int]
) -> Iterator[tuple[int, Interval]]:
    """Deal a range out to the candidates that have sent least, and add it to their loads.

    Args:
        interval: Range of units, each of which all candidates hold.
        candidates: Ranks, preferred first among equal loads.
        loads: Number of units that each rank sends already.
    """
    start, stop = interval
    order = sorted(candidates, key=lambda rank: loads.get(rank, 0))
    own = [loads.get(rank, 0) for rank in order]
    # The least loaded ranks that can be raised to one level, as many as the units reach.
    used = max(n for n in range(1, len(own) + 1) if n * own[n - 1] - sum(own[:n]) <= stop - start)
    level, extra = divmod(stop - start + sum(own[:used]), used)
    for i, rank in enumerate(order[:used]):
        count = level - own[i] + (i < extra)
        if count:
            loads[rank] = own[i] + count
            yield rank, (start, start + count)
            start += count


def balance_senders(
    wanted: Sequence[tuple[int, Interval, Sequence[int]]], loads: dict[int, int]
) -> list[tuple[int, list[tuple[int, Interval]]]]:
    """Deal many ranges out, so that no rank sends two units more than another that could send one.

    Args:
        wanted: Target, range of units, and the ranks that hold all of it, preferred first.
        loads: Number of units that each rank sends already; those dealt out are added.

    Returns:
        For each of `wanted` the target, and the senders with their parts of the range.
    """
    dealt = [list(level_senders(interval, ranks, loads)) for _, interval, ranks in wanted]
    # Each range was dealt without a look at later ones. It is dealt again as long as that lowers
    # the sum of squares of the loads, an integer; once it does for none, no unit has a better
    # sender.
    improved = True
    while improved:
        improved = False
        for i, (_, interval, ranks) in enumerate(wanted):
            own = {rank: loads.get(rank, 0) for rank in ranks}
            before = sum(load * load for load in own.values())
            for rank, (start, stop) in dealt[i]:
                own[rank] -= stop - start
            again = list(level_senders(interval, ranks, own))
            if sum(load * load for load in own.values()) < before:
                dealt[i], improved = again, True
                loads.update(own)
    return [(target, own) for (target, _, _), own in zip(wanted, dealt, strict=True)]
