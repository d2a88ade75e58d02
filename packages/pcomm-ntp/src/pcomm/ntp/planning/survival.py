"""What a job may lose at once while all of its state is left, in numbers and in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

__all__ = ["Survival"]


@dataclass(frozen=True)
class Survival:
    """How far apart the copies of a state lie, where that is least.

    Args:
        ranks: Ranks that have a unit of which the fewest have it; 0 where there is no state.
        hosts: Hosts on which a unit lies that is on the fewest.
    """

    ranks: int
    hosts: int

    @classmethod
    def of(cls, holders: Iterable[Collection[int]], names: Mapping[int, str]) -> Self:
        """Of a state whose parts lie on these ranks each. Local.

        Args:
            holders: Ranks of each part; equal ones may come again.
            names: Host of each rank.
        """
        found = {tuple(sorted(ranks)) for ranks in holders}
        return cls(
            min(map(len, found), default=0),
            min((len({names[rank] for rank in ranks}) for ranks in found), default=0),
        )

    def is_less(self, other: Survival) -> bool:
        """Whether fewer ranks or fewer hosts may be lost than with `other`."""
        return self.ranks < other.ranks or self.hosts < other.hosts

    def describe(self) -> str:
        """All of it in one sentence."""
        kept = f"{self.kept} costs no step, and " if self.kept else ""
        return (
            f"of each part there is a copy on {_counted(self.ranks, 'rank')} of "
            f"{_counted(self.hosts, 'host')}, or on more; {kept}{self.lost} goes back to the "
            "newest checkpoint"
        )

    @property
    def kept(self) -> str:
        """What costs no step, in words; empty where any death may cost some."""
        if self.ranks < 2:
            return ""
        ranks = f"the death of any {_counted(self.ranks - 1, 'rank')}"
        if self.hosts < 2:
            return ranks
        return f"{ranks}, or the loss of any {_counted(self.hosts - 1, 'host')},"

    @property
    def lost(self) -> str:
        """What goes back to the newest checkpoint, in words."""
        if self.ranks < 2:
            return "the death of a rank that alone has a part of the state"
        if self.hosts < 2:
            return (
                f"the loss of a host, or of {_counted(self.ranks, 'rank')} at once, that alone had "
                "a part of the state"
            )
        return (
            f"the loss of {_counted(self.hosts, 'host')} at once that alone had a part of the state"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
