"""Which entries of a cache are given up first: those that save the least work per byte."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

__all__ = ["EvictionQueue"]

Entry = TypeVar("Entry")
Use = tuple[float, int]
_LEAST_LENGTH = 64


class EvictionQueue(Generic[Entry]):
    """Entries by their credit, the least first (the rule GreedyDual-Size).

    The credit of an entry is its worth, saved work per byte, plus the credit of what was given up
    last before it was used last. Old entries so lose to new ones, the sooner the less they are
    worth; with equal worth it is the order of last use.

    Args:
        is_current: Function of an entry and a number; true if the entry may be given up and the
            number is that of its newest `put`.
    """

    def __init__(self, is_current: Callable[[Entry, int], bool]) -> None:
        self._is_current = is_current
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._spent = 0.0
        self._uses = self._number = 0
        self._most = _LEAST_LENGTH

    def use(self) -> Use:
        """Note that something is used now; `put` takes the result, now or later."""
        self._uses += 1
        return self._spent, self._uses

    def put(self, entry: Entry, worth: float, last_use: Use) -> int:
        """Enter something, and return the number of this entry; older ones of it lapse.

        Args:
            entry: Thing that may be given up.
            worth: Saved work per byte.
            last_use: Result of `use` when it was used last.
        """
        self._number += 1
        credit, order = last_use
        heappush(self._heap, (credit + worth, order, self._number, entry))
        if len(self._heap) > self._most:
            # The new one is current only when its owner has noted the number.
            self._heap = [
                item
                for item in self._heap
                if item[2] == self._number or self._is_current(item[3], item[2])
            ]
            heapify(self._heap)
            self._most = max(_LEAST_LENGTH, 2 * len(self._heap))
        return self._number

    def pop(self) -> Entry | None:
        """Take out the entry of least credit; None if there is none."""
        while self._heap:
            credit, _, number, entry = heappop(self._heap)
            if self._is_current(entry, number):
                self._spent = max(self._spent, credit)
                return entry
        return None
