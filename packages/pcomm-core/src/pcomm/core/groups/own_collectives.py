"""Collectives that the caller of `open_groups` makes, one for each communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError
from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.group import Group

__all__ = ["with_own_collectives"]

_TOPIC = "open_groups: collectives"


def with_own_collectives(
    opened: Sequence[Group], make: Callable[[Group], Collectives], *, timeout_s: float
) -> list[Group]:
    """The same groups, whose operations go through what `make` returns for each communicator.

    Collective: every rank calls it with its groups, in one order for all. A communicator is left
    out on all of its ranks where one of them has failed before, so `make` may be collective.

    Args:
        opened: Groups of this rank, in the order in which they were opened.
        make: Called with the first group of each communicator. A `close` of what it returns is
            called before the groups close.
        timeout_s: Seconds to wait for the other ranks of a communicator.

    Raises:
        Exception: What `make` raised for the first communicator on which it failed here.
        ConfigError: It returned something else than collectives of that group.
        PeerError: It failed on another rank of a communicator.
    """
    made: dict[dist.ProcessGroup, Collectives] = {}
    failure: Exception | None = None
    for group in opened:
        if group.process_group is None or group.process_group in made:
            continue
        made[group.process_group] = group.collectives
        try:
            agree_in_group(group, _TOPIC, [], error=failure, timeout_s=timeout_s)
            found = make(group)
            if found is group.collectives:
                continue
            close = getattr(found, "close", None)
            if close is not None:
                group.before_close(close)
            _check(group, found)
            made[group.process_group] = found
        except Exception as problem:
            failure = failure or problem
    if failure is not None:
        raise failure
    return [
        group
        if group.process_group is None or made[group.process_group] is group.collectives
        else group.with_collectives(made[group.process_group])
        for group in opened
    ]


def _check(group: Group, found: object) -> None:
    told = type(found).__name__
    if isinstance(found, Collectives):
        if (found.rank, found.size) == (group.rank, group.size):
            return
        told = f"rank {found.rank} of {found.size}"
    raise ConfigError(
        f"{_TOPIC} of group {group.key}",
        found=f"{told}, for rank {group.rank} of {group.size}",
        why="What `collectives` returns takes the place of the group's own operations.",
        fix="Return collectives of that group, such as `group.collectives` or some around them.",
    )
