"""A flag in the store by which a rank that failed tells the ranks that wait for it."""

from __future__ import annotations

from pcomm.core.control.control import Control
from pcomm.core.control.default import control_of_group
from pcomm.core.groups.group import Group

__all__ = ["FailureFlag"]


class FailureFlag:
    """A flag in the store that a failed rank raises, and that the other ranks poll while they wait.

    A collective ends only when every rank joins it, and a rank that has failed never does. It
    raises the flag for the round of work in which it failed. Ranks that wait in that round read it,
    at the price of one read of the store now and then, and only while they wait.

    Making one is collective: the ranks agree on the key of the flag. `sound` and `heard` are local.

    Args:
        listeners: Ranks that poll: those of a control, or those of a group, which then agree in
            the store of torch.distributed.
        topic: Subject of the flag, the same on every rank; part of the keys.

    Raises:
        PeerTimeoutError: A rank made none.
        FencedError: A newer generation than that of the control has begun.
    """

    def __init__(self, listeners: Group | Control, topic: str) -> None:
        control = control_of_group(listeners) if isinstance(listeners, Group) else listeners
        self._rank, self._store = control.rank, control.store
        self._name = control.agree(f"failure flag {topic}")

    def sound(self, message: str, *, round_number: int) -> None:
        """Record that this rank failed in a round; the first message of a round stays."""
        if self._store is not None:
            key = f"{self._name}/round {round_number}"
            self._store.compare_set(key, "", f"rank {self._rank}: {message}")

    def heard(self, *, round_number: int) -> str | None:
        """The message of the rank that failed in a round, or None."""
        key = f"{self._name}/round {round_number}"
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()
