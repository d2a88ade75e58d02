"""The ranks that a sharded model shares anything with, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pcomm.core.control.failure_flag import FailureFlag
from pcomm.core.errors import PcommError
from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.group import Group

__all__ = ["Peers"]


class Peers:
    """Every group of a model once, so that a mistake on one rank is an error on all of them.

    Args:
        groups: Groups of all roles and scopes; those over the same ranks count once.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        distinct: dict[tuple[int, ...], Group] = {}
        for group in groups:
            distinct.setdefault(group.ranks, group)
        # Largest first: the first meeting tells most ranks, and all ranks agree on the order.
        self.groups = sorted(
            (group for group in distinct.values() if group.size > 1),
            key=lambda group: (-group.size, group.name),
        )
        self._alarms: list[FailureFlag] = []

    def sound(self, message: str, *, round_number: int) -> None:
        """Tell every rank that waits in this round that this one has failed. Local."""
        for alarm in self._alarms:
            alarm.sound(message, round_number=round_number)

    def heard(self, *, round_number: int) -> str | None:
        """What a rank said that failed in this round. Local."""
        for alarm in self._alarms:
            message = alarm.heard(round_number=round_number)
            if message is not None:
                return message
        return None

    def agree(
        self,
        topic: str,
        lines: Sequence[str] | Callable[[Group], Sequence[str]],
        *,
        error: Exception | None = None,
    ) -> None:
        """Raise on all ranks if any has an error or other lines. Collective over all groups.

        An error passes through every group that this rank belongs to, twice, so it reaches ranks
        that share no group with the one that has it.

        Args:
            topic: What the lines are about.
            lines: What this rank holds, or what it holds for one group.
            error: What this rank found wrong.
        """
        if not self.groups and error is not None:
            raise error
        rounds = 2 if len(self.groups) > 1 else 1
        for number in range(rounds):
            for group in self.groups:
                mine = lines(group) if callable(lines) else lines
                try:
                    agree_in_group(group, topic, mine if number == 0 else [], error=error)
                except PcommError as problem:
                    error = error or problem
        if error is not None:
            raise error
        if not self._alarms:
            # Ranks that agree hold the same groups, so they can make the alarms together.
            self._alarms = [FailureFlag(group, "fsdp") for group in self.groups]
