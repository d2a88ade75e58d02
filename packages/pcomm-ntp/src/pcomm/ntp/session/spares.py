"""Spare processes: they wait without a model until a rank is gone, and then have its place.

A spare asks to join as any newcomer does, by a number that the topology does not have. Which place
it gets is a part of the decision that begins a generation, which one compare-and-set writes. So a
place is given away once, also where several spares and the rank's own process ask for it, and one
generation both misses the rank that died and has the spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from pcomm.ntp.session.records import Join

__all__ = ["Spares"]


class Spares:
    """The spares that wait, as this rank knows from their requests. Local.

    Args:
        places: Ranks that the job may ever have, each with the number of its replica.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        self._places = dict(places)
        self._waiting: dict[int, Join] = {}

    def wait(self, number: int, join: Join) -> None:
        """Note the request of a spare; again it changes nothing."""
        self._waiting[number] = join

    def could_fill(self, ranks: Collection[int]) -> bool:
        """Whether a spare waits, and one of the places is not among `ranks`."""
        return bool(self._waiting) and any(rank not in ranks for rank in self._places)

    def fill(self, ranks: Collection[int], is_answered: Callable[[Join], bool]) -> dict[int, Join]:
        """The spares for the places that are not among `ranks`, by place.

        Replicas that lack the fewest ranks are filled first, since most of what a spare brings is
        lost where other ranks of its replica are gone. The spare that asked first goes first.

        Args:
            ranks: Ranks that have a process.
            is_answered: Function that tells of a request whether it needs no place any more, since
                its process has one, was refused, or has ended.
        """
        vacant = [rank for rank in self._places if rank not in ranks]
        lacks = Counter(self._places[rank] for rank in vacant)
        vacant.sort(key=lambda rank: (lacks[self._places[rank]], self._places[rank], rank))
        found: dict[int, Join] = {}
        for number in sorted(self._waiting):
            if len(found) == len(vacant):
                break
            if is_answered(self._waiting[number]):
                del self._waiting[number]
            else:
                found[vacant[len(found)]] = self._waiting[number]
        return found
