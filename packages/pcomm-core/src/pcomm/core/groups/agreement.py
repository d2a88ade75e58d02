"""Agreement of the ranks of a group before they enter a collective."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.core.control.control import Control
from pcomm.core.control.default import control_of_group
from pcomm.core.control.votes import Vote
from pcomm.core.groups.group import Group

__all__ = ["agree_in_group", "vote"]


def agree_in_group(
    group: Group,
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
    group: Group,
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


def _topic(group: Group, topic: str) -> str:
    # Groups of the same ranks may agree about the same topic one after another.
    return f"{topic}: group {group.key}"
