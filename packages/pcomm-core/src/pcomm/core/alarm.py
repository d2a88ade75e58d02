"""A rank that has failed tells those that wait for it."""

from __future__ import annotations

from torch.distributed import distributed_c10d

from pcomm.core.group import Group

__all__ = ["Alarm"]


class Alarm:
    """A note in torch's store that the other ranks of a group look for while they wait.

    A collective ends only when every rank joins it, and a rank that has failed never does. It
    sounds the alarm for the round of work in which it failed; whoever waits in that round hears of
    it, at the price of one look into the store now and then, and only while it waits.

    Every rank of the group makes its alarms in the same order. Local.

    Args:
        group: Who listens.
        topic: What the alarm is about; part of the keys.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._rank = group.ranks[group.rank]
        self._store = distributed_c10d._get_default_store() if group.size > 1 else None
        self._prefix = ""
        if self._store is not None:
            made = f"pcomm/alarm/{topic}/{group.key}/{group.ranks[0]}"
            # Counted in the store, so that no state is kept in the process.
            number = self._store.add(f"{made}/{self._rank}", 1)
            self._prefix = f"{made}/number {number}"

    def sound(self, message: str, *, round_number: int) -> None:
        """Tell the others that this rank failed in a round; the first message of a round stays."""
        if self._store is not None:
            key = f"{self._prefix}/{round_number}"
            self._store.compare_set(key, "", f"rank {self._rank}: {message}")

    def heard(self, *, round_number: int) -> str | None:
        """What a rank said that failed in a round, or None."""
        key = f"{self._prefix}/{round_number}"
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()
