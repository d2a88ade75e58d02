"""Agreement of the ranks of a group before a collective, and a flag for a rank that fails in it."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.core.control.control import Control, Vote
from pcomm.core.control.without_control import RanksOfGroup, control_of_group

__all__ = ["FailureFlag", "agree_in_group", "vote"]


def agree_in_group(
    group: RanksOfGroup,
    topic: str,
    lines: Sequence[str],
    *,
    error: Exception | None = None,
    timeout_s: float | None = None,
    control: Control | None = None,
) -> None:
    """Make sure that no rank of the group has an error, and that all hold the same lines.

    Collective over the group, through a store and so without a communicator. Alone it only
    raises the error.

    Args:
        group: Group whose ranks take part.
        topic: Subject of the lines; part of the keys and of errors.
        lines: Facts that this rank holds, one a line; any if it has an error.
        error: Error that this rank found before.
        timeout_s: Seconds to wait for the others; by default that of `control`, or
            `PCOMM_TIMEOUT_S`.
        control: Control by which the ranks agree, such as `groups.control`; by default they agree
            in the store of torch.distributed.

    Raises:
        Exception: This rank's own `error`.
        PeerError: Another rank's.
        DivergenceError: The lines differ; on every rank, naming the first difference.
        PeerTimeoutError: A rank did not arrive.
        FencedError: A newer generation than that of `control` has begun.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    topic = _topic(group, topic)
    control_of_group(group, control).agree(topic, lines, error=error, timeout_s=timeout_s)


def vote(
    group: RanksOfGroup,
    topic: str,
    value: int,
    reason: str = "",
    *,
    error: Exception | None = None,
    timeout_s: float | None = None,
    control: Control | None = None,
) -> Vote:
    """Give every rank of the group the value and the reason of all of them; see `Control.vote`.

    Collective over the group, through a store and so without a communicator. A rank alone gets
    its own value at once.

    Args:
        group: Group whose ranks take part.
        topic: Subject of the vote; part of the keys and of errors.
        value: Number that this rank votes for.
        reason: Text for the other ranks, such as the reason of the value.
        error: Error that this rank found before.
        timeout_s: Seconds to wait for the others; by default that of `control`, or
            `PCOMM_TIMEOUT_S`.
        control: Control by which the ranks agree, such as `groups.control`; by default they agree
            in the store of torch.distributed.

    Returns:
        Minimum, values and reasons, in the order of the group's ranks; equal on all of them.

    Raises:
        Exception: This rank's own `error`.
        PeerError: Another rank's.
        PeerTimeoutError: A rank did not arrive.
        FencedError: A newer generation than that of `control` has begun.
    """
    if group.size == 1:
        agreeing = Control(None, group.ranks, group.ranks[0])
    else:
        agreeing = control_of_group(group, control)
    return agreeing.vote(_topic(group, topic), value, reason, error=error, timeout_s=timeout_s)


def _topic(group: RanksOfGroup, topic: str) -> str:
    # Groups of the same ranks may agree about the same topic one after another.
    return f"{topic}: group {group.key}"


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

    def __init__(self, listeners: RanksOfGroup | Control, topic: str) -> None:
        control = listeners if isinstance(listeners, Control) else control_of_group(listeners)
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
