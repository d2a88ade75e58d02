"""Which ranks own the optimizer's state of which units: a few of those that hold the weights.

A range of units that several ranks hold is cut among them, so that each unit has as many owners as
there are copies: on different hosts, as far as there are so many, else of different replicas, else
on different ranks. An owner has the state of its units, and computes their step; the others that
hold them get the weights. Who owned a unit and still holds it goes on to own it: nothing moves
because a rank owns up to an eighth more than its share of a parameter. What moves after a death is
what the dead had, and what a rank that is cut anew no longer holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pcomm.ntp.planning.hosts import CopyPlace, Hosts, places_of
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.survival import Survival

__all__ = ["Intervals", "OwnedRange", "Owners", "UnitSizes", "merged"]

Intervals = tuple[tuple[int, int], ...]
"""Ranges of units, ascending and apart: first unit, and the unit after the last one."""


class UnitSizes(NamedTuple):
    """What is dealt out of one parameter.

    Attributes:
        key: Name of its units in the plan; empty for a parameter that every rank holds whole, whose
            units are the positions of its first dimension.
        units: Number of units.
        size: Elements of one unit.
    """

    key: str
    units: int
    size: int


class OwnedRange(NamedTuple):
    """Units `start` to `stop - 1` with the ranks that own them.

    Attributes:
        start: First unit.
        stop: The unit after the last one.
        owners: Global ranks, ascending, on as many hosts as can be.
    """

    start: int
    stop: int
    owners: tuple[int, ...]


class Owners:
    """Who owns the state of which units, of all parameters of a stage; equal on all of its ranks.

    Args:
        sizes: The units of each parameter, by its name.
        ranges: The owned ranges of each parameter, ascending, which cover its units.
    """

    def __init__(
        self, sizes: Mapping[str, UnitSizes], ranges: Mapping[str, tuple[OwnedRange, ...]]
    ) -> None:
        self.sizes, self.ranges = dict(sizes), dict(ranges)

    @classmethod
    def deal(
        cls,
        plan: NtpPlan,
        rank: int,
        sizes: Mapping[str, UnitSizes],
        hosts: Hosts,
        *,
        before: Owners | None = None,
        alive: Collection[int] = (),
    ) -> Owners:
        """Choose owners among the ranks that hold each unit. Local; no communication.

        Args:
            plan: The plan by which ranks hold units.
            rank: Any rank of the stage.
            sizes: The units of each parameter, by its name.
            hosts: The host of each rank, and the number of copies.
            before: The owners so far, which keep what they can; None at the first dealing.
            alive: The ranks that still have what they owned.
        """
        loads: dict[int, int] = {}
        stay = frozenset(alive)
        replicas = {one: plan.place(one).replica for one in plan.stage_ranks(rank)}
        found: dict[str, tuple[OwnedRange, ...]] = {}
        # Most parameters have the units of others.
        groups: dict[tuple[str, int], list[tuple[int, int, tuple[int, ...]]]] = {}
        # Small parameters last: they level what is left over of large ones.
        for name in sorted(sizes, key=lambda one: (-sizes[one].units * sizes[one].size, one)):
            own = sizes[name]
            if own[:2] not in groups:
                groups[own[:2]] = list(holding_groups(plan, rank, own))
            old = () if before is None else before.ranges.get(name, ())
            parts = [
                _Part.of(ranks, _kept(old, start, stop, stay.intersection(ranks)), hosts, replicas)
                for start, stop, ranks in groups[own[:2]]
            ]
            runs = _dealt(parts, loads)
            for one in runs:
                for owner in one.owners:
                    loads[owner] = loads.get(owner, 0) + (one.stop - one.start) * own.size
            found[name] = _joined(runs)
        return cls(sizes, {name: found[name] for name in sizes})

    def held(self, name: str, rank: int) -> Intervals:
        """The units of a parameter whose state a rank has."""
        return self._held.get((name, rank), ())

    @cached_property
    def _held(self) -> dict[tuple[str, int], Intervals]:
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for name, ranges in self.ranges.items():
            for one in ranges:
                for rank in one.owners:
                    found.setdefault((name, rank), []).append((one.start, one.stop))
        return {key: merged(own) for key, own in found.items()}

    @cached_property
    def senders(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """The one owner that sends each range after a step: first unit, end, rank; by parameter.

        The owners of a range send equal parts of it.
        """
        sent: dict[int, int] = {}
        found = {}
        for name, ranges in self.ranges.items():
            own: list[tuple[int, int, int]] = []
            for one in ranges:
                start, owners = one.start, sorted(one.owners, key=lambda r: (sent.get(r, 0), r))
                for left, rank in zip(range(len(owners), 0, -1), owners, strict=True):
                    stop = start + -(-(one.stop - start) // left)
                    if stop > start:
                        own.append((start, stop, rank))
                        load = (stop - start) * self.sizes[name].size
                        sent[rank] = sent.get(rank, 0) + load
                    start = stop
            found[name] = tuple(own)
        return found

    def survival(self, hosts: Hosts) -> Survival:
        """What may be lost while an owner of each unit is left. Local.

        Args:
            hosts: Host of each rank.
        """
        owners = (one.owners for own in self.ranges.values() for one in own)
        return Survival.of(owners, hosts.names)

    def elements(self, rank: int) -> int:
        """Number of elements that a rank owns."""
        return sum(
            (stop - start) * one.size
            for name, one in self.sizes.items()
            for start, stop in self.held(name, rank)
        )

    def digest(self) -> str:
        """Text that is equal for equal owners."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        return json.dumps({name: [own, self.ranges[name]] for name, own in self.sizes.items()})

    @classmethod
    def from_json(cls, text: str) -> Owners:
        """Owners of the text of `to_json`."""
        found = json.loads(text)
        return cls(
            {name: UnitSizes(*own) for name, (own, _) in found.items()},
            {
                name: tuple(OwnedRange(a, b, tuple(owners)) for a, b, owners in ranges)
                for name, (_, ranges) in found.items()
            },
        )


def holding_groups(
    plan: NtpPlan, rank: int, own: UnitSizes
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """First unit, end, and the ranks of the stage that hold them; ascending.

    Args:
        plan: Plan that is in force.
        rank: Any rank of the stage.
        own: Units of the parameter.
    """
    if own.key:
        for one in plan.groups(own.key, rank):
            yield one.start, one.stop, one.ranks
    else:
        yield 0, own.units, plan.stage_ranks(rank)


def merged(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """Ascending ranges with neighbours that touch joined into one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _kept(
    old: Sequence[OwnedRange], start: int, stop: int, stays: Collection[int]
) -> list[OwnedRange]:
    """A range, cut as it was owned, with the owners that stay."""
    inside = [
        OwnedRange(max(one.start, start), min(one.stop, stop), one.owners)
        for one in old
        if one.start < stop and start < one.stop
    ]
    if not inside:
        return [OwnedRange(start, stop, ())] if start < stop else []
    return [one._replace(owners=tuple(r for r in one.owners if r in stays)) for one in inside]


def _joined(runs: Sequence[OwnedRange]) -> tuple[OwnedRange, ...]:
    found: list[OwnedRange] = []
    for one in sorted(runs):
        if found and found[-1].owners == one.owners and found[-1].stop == one.start:
            found[-1] = found[-1]._replace(stop=one.stop)
        else:
            found.append(one)
    return tuple(found)


_UNEVEN = 8
"""A rank may own so much of its share more than that, an eighth, before anything moves for it."""


def _apart(run: OwnedRange, place_of: Mapping[int, CopyPlace], left: dict[int, int]) -> OwnedRange:
    """A run with one owner at a place: there were fewer places when it was dealt out."""
    first: dict[CopyPlace, int] = {}
    for rank in run.owners:
        if first.setdefault(place_of[rank], rank) != rank:
            left[rank] += run.stop - run.start
    return run._replace(owners=tuple(sorted(first.values())))


class _Part(NamedTuple):
    """Units that the same ranks hold.

    Attributes:
        runs: The units, with the owners that stay.
        place_of: Place of each of the ranks.
        copies: Number of owners of each unit.
        shares: Share of each of the ranks.
    """

    runs: list[OwnedRange]
    place_of: dict[int, CopyPlace]
    copies: int
    shares: Mapping[int, int]

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        runs: list[OwnedRange],
        hosts: Hosts,
        replicas: Mapping[int, int],
    ) -> _Part:
        place_of = places_of(ranks, hosts, replicas)
        return cls(runs, place_of, min(hosts.copies, len(set(place_of.values()))), {})

    def within(self, runs: Iterable[OwnedRange]) -> list[OwnedRange]:
        """Those of `runs` that are cut from the units of this part."""
        if not self.runs:
            return []
        start, stop = self.runs[0].start, self.runs[-1].stop
        return [one for one in runs if start <= one.start < stop]

    def owned(self) -> Counter[int]:
        """Number of units that each rank owns."""
        found = Counter[int]()
        for one in self.runs:
            for rank in one.owners:
                found[rank] += one.stop - one.start
        return found

    @property
    def length(self) -> int:
        return sum(one.stop - one.start for one in self.runs)

    @property
    def missing(self) -> int:
        """Number of owners to find, of all units together."""
        return sum((one.stop - one.start) * (self.copies - len(one.owners)) for one in self.runs)

    def by_place(self) -> dict[CopyPlace, list[int]]:
        found: dict[CopyPlace, list[int]] = {}
        for rank, place in self.place_of.items():
            found.setdefault(place, []).append(rank)
        return found


def _dealt(parts: Sequence[_Part], loads: Mapping[int, int]) -> list[OwnedRange]:
    """Owners of all units of a parameter.

    A rank owns its shares of what it holds, taken together: where one part of that has been lost
    and another not, nothing moves that is somewhere already.
    """
    had, left, most = Counter[int](), Counter[int](), Counter[int]()
    shares = list[dict[int, int]]()
    for part in parts:
        own = part.owned()
        # Those that have some keep what cannot be shared equally.
        order = sorted(part.place_of, key=lambda rank: (-own[rank], loads.get(rank, 0), rank))
        places = list(part.by_place().values())
        shares.append(_shares(part.copies * part.length, places, part.length, order))
        left.update(shares[-1])
        had.update(own)
        # The shares of each part are rounded up or down.
        most.update(dict.fromkeys(part.place_of, 1))
    for rank in left:
        most[rank] = max(most[rank], left[rank] // _UNEVEN)
    runs = [one for part in parts for one in part.runs]
    over = {rank: had[rank] - left[rank] for rank in left}
    runs = _trimmed(runs, {rank: count for rank, count in over.items() if count > most[rank]})
    left.subtract({rank: min(had[rank], left[rank]) for rank in left})
    kept = [
        part._replace(
            runs=[_apart(one, part.place_of, left) for one in part.within(runs)], shares=share
        )
        for part, share in zip(parts, shares, strict=True)
    ]
    # First where the fewest can take more than is missing.
    kept.sort(key=lambda part: sum(left[rank] for rank in part.place_of) - part.missing)
    return [one for part in kept for one in _completed(part, left, most)]


def _completed(part: _Part, left: dict[int, int], most: Mapping[int, int]) -> list[OwnedRange]:
    """Find the owners that are missing, first of all those with most left of their shares.

    That is of their shares of this part, as long as these do: the rest is for other parts. Then it
    is of what they have left together. Where no rank that may own a unit has any left, one gets up
    to `most` units more than its share; for what is beyond that, others take over units of it.
    """
    on_host, found = part.by_place(), list[OwnedRange]()
    # Hosts that get more. Where their shares do not do, the others get more than theirs.
    wanting = list(on_host)
    had = part.owned()
    of_part = {rank: share - had[rank] for rank, share in part.shares.items()}
    for one in sorted(part.runs, key=lambda own: (len(own.owners), own)):
        need = part.copies - len(one.owners)
        if need <= 0:
            found.append(one)
            continue
        taken = {part.place_of[rank] for rank in one.owners}
        length = one.stop - one.start
        shares = {host: sum(left[rank] for rank in on_host[host]) for host in wanting}
        wanting = [host for host, share in shares.items() if share > 0]
        free = [host for host in wanting if host not in taken]
        if sum(min(length, shares[host]) for host in free) < need * length:
            free = [host for host in on_host if host not in taken]
        turn = length // (len(on_host) - len(taken))
        able = {rank: min(left[rank], of_part[rank]) for rank in left if rank in of_part}
        places = [on_host[host] for host in free]
        if sum(min(length, sum(able[rank] for rank in own)) for own in places) < need * length:
            able = left
        for run in _filled(one, need, places, able, turn):
            found.append(run)
            for rank in set(run.owners).difference(one.owners):
                left[rank] -= run.stop - run.start
                of_part[rank] -= run.stop - run.start
    for rank in part.place_of:
        if left[rank] < -most[rank]:
            found = _relieved(found, rank, part.place_of, left)
    return found


def _shares(
    total: int, on_host: Sequence[Sequence[int]], most: int, order: Sequence[int]
) -> dict[int, int]:
    """Equal parts of `total` for ranks, of which those of a host have `most` together at most.

    What cannot be shared equally goes to the ranks that come first in `order`.
    """
    low, high = 0, most
    sizes = Counter(map(len, on_host))

    def dealt(level: int) -> int:
        return sum(number * min(most, size * level) for size, number in sizes.items())

    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if dealt(level) <= total else (low, level - 1)
    found: dict[int, int] = {}
    spare: dict[int, list[int]] = {}
    for own in on_host:
        amount = min(most, len(own) * low)
        found.update(dict.fromkeys(own, amount // len(own)))
        # What a host may have beyond that: the rest of its part, and what is left of all.
        rest = [amount - amount // len(own) * len(own), most - amount]
        spare.update(dict.fromkeys(own, rest))
    left = total - dealt(low)
    for rank in order:
        rest = spare[rank]
        if rest[0]:
            rest[0] -= 1
            found[rank] += 1
        elif rest[1] and left:
            rest[1] -= 1
            left -= 1
            found[rank] += 1
    return found


def _relieved(
    runs: list[OwnedRange], rank: int, place_of: Mapping[int, CopyPlace], left: dict[int, int]
) -> list[OwnedRange]:
    """Give units of a rank that owns more than its share to others that own less."""
    found: list[OwnedRange] = []
    for one in runs:
        if rank not in one.owners:
            found.append(one)
            continue
        others = tuple(own for own in one.owners if own != rank)
        taken = {place_of[own] for own in others}
        able = [own for own in place_of if left[own] > 0 and place_of[own] not in taken]
        start = one.start
        for other in able:
            count = min(-left[rank], left[other], one.stop - start)
            if count > 0:
                owners = tuple(sorted((*others, other)))
                found.append(OwnedRange(start, start + count, owners))
                left[rank] += count
                left[other] -= count
                start += count
        if start < one.stop:
            found.append(one._replace(start=start))
    return found


def _trimmed(runs: Sequence[OwnedRange], excess: Mapping[int, int]) -> list[OwnedRange]:
    """Take so many units from each rank of `excess`, first where most others own them, too."""
    # By their first units, and these by rank: there may be as many ranges as ranks.
    found = {one.start: one for one in runs}
    starts: dict[int, set[int]] = {}
    for one in runs:
        for rank in one.owners:
            starts.setdefault(rank, set()).add(one.start)
    for rank, count in excess.items():
        own = [found[start] for start in starts[rank]]
        for one in sorted(own, key=lambda run: (-len(run.owners), -run.start)):
            if count <= 0:
                break
            cut = max(one.start, one.stop - count)
            others = tuple(other for other in one.owners if other != rank)
            if one.start < cut:
                found[one.start] = one._replace(stop=cut)
            else:
                starts[rank].discard(cut)
            found[cut] = OwnedRange(cut, one.stop, others)
            for other in others:
                starts[other].add(cut)
            count -= one.stop - cut
    return list(found.values())


def _filled(
    run: OwnedRange, copies: int, free: Sequence[Sequence[int]], able: Mapping[int, int], turn: int
) -> Iterator[OwnedRange]:
    """Give a range so many further owners, first those that are able to own most.

    Each host gets one stretch, and these follow each other round and round; as none is longer than
    the range, no host has a unit twice. Each round begins `turn` units later, so that a host has
    another one beside it in each part of its stretch, and many take over what it had.
    """
    length = run.stop - run.start
    by_host = _most_first(copies * length, [sum(able[r] for r in own) for own in free], length)
    turn = turn if max(by_host) + turn <= length else 0
    at, begins, ends = 0, dict[int, list[int]](), dict[int, list[int]]()
    for own, amount in zip(free, by_host, strict=True):
        for rank, count in zip(
            own, _most_first(amount, [able[r] for r in own], amount), strict=True
        ):
            while count:
                place = (at + at // length * turn) % length
                step = min(count, length - place, length - at % length)
                begins.setdefault(place, []).append(rank)
                ends.setdefault(place + step, []).append(rank)
                at, count = at + step, count - step
    more: set[int] = set()
    for start, stop in pairwise(sorted({0, length, *begins, *ends})):
        more = more.difference(ends.get(start, ())).union(begins.get(start, ()))
        owners = tuple(sorted({*run.owners, *more}))
        yield OwnedRange(run.start + start, run.start + stop, owners)


def _most_first(total: int, values: Sequence[int], most: int) -> list[int]:
    """Amounts that are `total` together, taken from the largest values down to one level."""
    if not total or len(values) == 1:
        return [total] * len(values)

    def taken(level: int) -> list[int]:
        return [min(most, max(0, value - level)) for value in values]

    if sum(found := taken(0)) == total:
        return found
    low, high = min(values) - most, max(values)
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if sum(taken(level)) >= total else (low, level - 1)
    found, lower = taken(low), taken(low + 1)
    excess = sum(found) - total
    for i in range(len(found)):
        if excess and lower[i] < found[i]:
            found[i] -= 1
            excess -= 1
    return found
