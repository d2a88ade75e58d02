"""A rank that has failed tells those that wait for it."""

from __future__ import annotations

from pcomm.core.control.control import Control
from pcomm.core.control.default import control_of_group
from pcomm.core.groups.group import Group

__all__ = ["FailureFlag"]


class FailureFlag:
    """A note in the store that the other ranks of a group look for while they wait.

    A collective ends only when every rank joins it, and a rank that has failed never does. It
    sounds the alarm for the round of work in which it failed; whoever waits in that round hears of
    it, at the price of one look into the store now and then, and only while it waits.

    Making one is collective: the ranks that listen agree on where the note is kept. Sounding and
    hearing are local.

    Args:
        listeners: Who listens: the ranks of a control, or those of a group, which then agree in
            the store of torch.distributed.
        topic: What the alarm is about, the same on every rank; part of the keys.

    Raises:
        PeerTimeoutError: A rank made none.
        FencedError: A newer generation than that of the control has begun.
    """

    def __init__(self, listeners: Group | Control, topic: str) -> None:
        control = control_of_group(listeners) if isinstance(listeners, Group) else listeners
        self._rank, self._store = control.rank, control.store
        self._name = control.agree(f"alarm {topic}")

    def sound(self, message: str, *, round_number: int) -> None:
        """Tell the others that this rank failed in a round; the first message of a round stays."""
        if self._store is not None:
            key = f"{self._name}/round {round_number}"
            self._store.compare_set(key, "", f"rank {self._rank}: {message}")

    def heard(self, *, round_number: int) -> str | None:
        """What a rank said that failed in a round, or None."""
        key = f"{self._name}/round {round_number}"
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()
