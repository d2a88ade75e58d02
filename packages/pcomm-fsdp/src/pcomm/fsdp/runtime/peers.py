"""The ranks that a sharded model shares groups with: agreements and failures."""

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
        groups: Groups of all roles and scopes; of those over the same ranks the first one counts.
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
        self._flags: list[FailureFlag] = []

    def tell_failure(self, message: str, *, round_number: int) -> None:
        """Tell every rank that waits in this round that this one has failed. Local."""
        for flag in self._flags:
            flag.sound(message, round_number=round_number)

    def failure(self, *, round_number: int) -> str | None:
        """Message of a rank that has failed in this round; None if none has. Local."""
        for flag in self._flags:
            message = flag.heard(round_number=round_number)
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
            topic: Name of the agreement, for errors.
            lines: Text that all ranks of a group must have in common, or a function of the group
                that returns it.
            error: The error that this rank has found; None if there is none.
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
        if not self._flags:
            # Ranks that agree hold the same groups, so they can make the flags together.
            self._flags = [FailureFlag(group, "fsdp") for group in self.groups]
