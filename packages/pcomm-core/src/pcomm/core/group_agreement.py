"""The ranks of a group agree on something before they communicate about it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import distributed_c10d

from pcomm.core import env
from pcomm.core.agreement import agree_on_lines, fail_together
from pcomm.core.group import Group

__all__ = ["agree_in_group"]


def agree_in_group(
    group: Group,
    topic: str,
    lines: Sequence[str],
    *,
    error: Exception | None = None,
    timeout_s: float | None = None,
) -> None:
    """Make sure that no rank of the group has an error, and that all hold the same lines.

    Collective over the group, through torch's store and so without a communicator. Alone it only
    raises the error.

    Args:
        group: The ranks that take part.
        topic: What the lines are about; part of the keys and of errors.
        lines: What this rank holds, one fact a line; any if it has an error.
        error: What this rank found wrong before.
        timeout_s: Seconds to wait for the others; by default `PCOMM_TIMEOUT_S`.

    Raises:
        Exception: This rank's own `error`.
        PeerError: Another rank's.
        DivergenceError: The lines differ; on every rank, naming the first difference.
        PeerTimeoutError: A rank did not arrive.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return
    store, rank = distributed_c10d._get_default_store(), group.ranks[group.rank]
    wait_s = env.timeout_s() if timeout_s is None else timeout_s
    # Groups that share a rank may meet about the same topic one after another.
    topic = f"{topic}: group {group.key}"
    fail_together(store, topic, error, rank, group.ranks, timeout_s=wait_s)
    agree_on_lines(store, topic, lines, rank, group.ranks, timeout_s=wait_s)
