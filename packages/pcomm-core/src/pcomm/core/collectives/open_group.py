"""A reference to a torch process group that is refused once the group is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

from pcomm.core.errors import ClosedError

__all__ = ["OpenGroup"]


class OpenGroup:
    """A weak reference to a process group, resolved when an operation is issued.

    Weak, so that a result, a hook or a model that outlives its groups keeps no connections and no
    polling threads.

    Args:
        process_group: A group that this rank belongs to.
    """

    __slots__ = ("_description", "_find")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._find: Callable[[], dist.ProcessGroup | None] = weakref.ref(process_group)
        self._description = process_group.group_desc

    def get(self) -> dist.ProcessGroup:
        """The process group. Local.

        Raises:
            ClosedError: It was closed, or torch.distributed has ended.
        """
        found = self._find()
        if found is None:
            raise ClosedError(
                f"an operation of the communicator {self._description!r}",
                found="that communicator was closed",
                why="Closing the groups, or ending torch.distributed, ends its connections.",
                fix="Do it inside the `with` block of the groups, or open new ones.",
            )
        return found

    def close(self) -> None:
        """Refuse from now on. Local."""
        self._find = _nothing


def _nothing() -> None:
    return None
