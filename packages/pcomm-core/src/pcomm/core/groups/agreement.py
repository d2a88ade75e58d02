"""Agreement of the ranks of a group before they enter a collective."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.core.control.control import Control
from pcomm.core.control.default import control_of_group
from pcomm.core.groups.group import Group

__all__ = ["agree_in_group"]


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
    # Groups of the same ranks may agree about the same topic one after another.
    topic = f"{topic}: group {group.key}"
    control_of_group(group, control).agree(topic, lines, error=error, timeout_s=timeout_s)
