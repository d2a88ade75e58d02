"""Moves: which units of a parameter go from which rank to which when a plan follows another."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple
from zlib import crc32

from pcomm.core.errors import ConfigError, PcommError
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.reshard.holdings import Interval, WholeGroup, held_by_group, whole_groups
from pcomm.ntp.reshard.senders import balanced, lacking, leveled, pieces

__all__ = ["Move", "StateLostError", "check_same_job", "moves", "units_of"]


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
    old: Plan, new: Plan, name: str, *, holders: Collection[int], stage: int | None = None
) -> tuple[Move, ...]:
    """What has to be sent so that every rank of `new` has its units of a parameter. Local, pure.

    Each rank gets exactly the units that it lacks, each from one rank: from its own
    tensor-parallel group where one is left that has them, and otherwise from all replicas in
    equal amounts. The same on all ranks that pass the same arguments.

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
    units = units_of(old, name)
    alive = frozenset(holders)
    found: list[Move] = []
    for number, groups in whole_groups(old.topology).items():
        if stage is None or number == stage:
            found += _moves_of_stage(old, new, name, units, groups, alive)
    return tuple(sorted(found, key=lambda move: (move.target, move.start)))


def units_of(plan: Plan, name: str) -> Units | None:
    """The units of a parameter; None if it is replicated, or the plan does not name it."""
    found = plan.units_of(name)
    return found[1] if found is not None and found[1].is_split else None


def check_same_job(old: Plan, new: Plan) -> None:
    """Raise `ConfigError` unless both plans are of the same topology, failures apart, and units."""
    for field, one, other in (
        ("axes", dict(old.topology.axes), dict(new.topology.axes)),
        ("order", old.topology.order, new.topology.order),
        ("offset", old.topology.offset, new.topology.offset),
        ("units", dict(old.units), dict(new.units)),
    ):
        if one != other:
            raise ConfigError(
                f"reshard: {field} of two plans",
                found=f"{one} in the old plan, {other} in the new one",
                why="Ranks keep their coordinates for life, and parameters their units: only "
                "failures, speeds and degrees differ from plan to plan.",
                fix="Make both plans from one topology and the same units.",
            )


def _moves_of_stage(
    old: Plan,
    new: Plan,
    name: str,
    units: Units | None,
    groups: tuple[WholeGroup, ...],
    alive: frozenset[int],
) -> Iterator[Move]:
    had = {group: held_by_group(old, units, group) for group in groups}
    has = {
        group: {rank: own for rank, own in ranks.items() if rank in alive}
        for group, ranks in had.items()
    }
    loads: dict[int, int] = {}
    # Parameters of equal units would otherwise all prefer the same senders.
    turn = crc32(name.encode())
    afar: list[tuple[int, Interval]] = []
    for group in groups:
        near = has[group]
        for target, wanted in held_by_group(new, units, group).items():
            for interval in lacking(wanted, near.get(target)):
                for piece, ranks in pieces(interval, near):
                    if ranks:
                        yield from _sent(target, piece, ranks, loads, turn)
                    else:
                        afar.append((target, piece))
    if not afar:
        return
    everyone = {rank: own for ranks in has.values() for rank, own in ranks.items()}
    cut = [(target, *piece) for target, own in afar for piece in pieces(own, everyone)]
    for _, piece, ranks in cut:
        if not ranks:
            raise _lost(name, piece, {r: own for one in had.values() for r, own in one.items()})
    turned = [(target, piece, _turned(ranks, turn)) for target, piece, ranks in cut]
    for target, dealt in balanced(turned, loads):
        for source, (start, stop) in dealt:
            yield Move(source, target, start, stop)


def _turned(ranks: list[int], turn: int) -> list[int]:
    first = turn % len(ranks)
    return ranks[first:] + ranks[:first]


def _sent(
    target: int, interval: Interval, ranks: list[int], loads: dict[int, int], turn: int
) -> Iterator[Move]:
    for source, (start, stop) in leveled(interval, _turned(ranks, turn), loads):
        yield Move(source, target, start, stop)


def _lost(name: str, interval: Interval, had: dict[int, Interval]) -> StateLostError:
    start, stop = interval
    ranks = sorted(rank for rank, (a, b) in had.items() if a < stop and start < b)
    return StateLostError(
        f"reshard: {name!r}, units {start} to {stop - 1}",
        found=f"ranks {ranks} had them, and none of these is left with its state",
        why="State comes from ranks that live; in no replica did one survive that has these units.",
        fix="Load a checkpoint in the new plan on all ranks, as Session does with restore.",
    )
