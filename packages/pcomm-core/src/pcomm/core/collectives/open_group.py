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

    __slots__ = ("_description", "_find", "_is_abandoned", "_skipped")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._find: Callable[[], dist.ProcessGroup | None] = weakref.ref(process_group)
        self._description = process_group.group_desc
        self._is_abandoned = False
        self._skipped = ""

    def get(self) -> dist.ProcessGroup:
        """The process group. Local.

        Raises:
            ClosedError: It was closed, or torch.distributed has ended; or an operation was refused
                here, and the backend cannot leave it out.
        """
        found = self._find()
        if found is None and self._skipped:
            raise ClosedError(
                f"an operation of the communicator {self._description!r}",
                found=f"an earlier {self._skipped} of it was refused on this rank",
                why="Other ranks may be in that operation, and the next one here would meet it.",
                fix="Mend the call that was refused; to go on after it, open new groups.",
            )
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

    def abandon(self) -> None:
        """Refuse from now on, also to wait for what is in flight. Local."""
        self._find, self._is_abandoned = _nothing, True

    def refuse_after(self, operation: str) -> None:
        """Refuse from now on, since this rank has left out an operation. Local."""
        if self._find() is not None:
            self._find, self._skipped = _nothing, operation

    def check_wait(self, work: dist.Work) -> None:
        """Allow to wait for an operation that was issued before. Local.

        Raises:
            ClosedError: The group was abandoned while it was in flight. Torch's own error may come
                late: gloo ends an operation of which a message had arrived in part only when the
                time limit of the group is over.
        """
        if self._is_abandoned and not work.is_completed():
            raise self.left_in_flight()

    def left_in_flight(self) -> ClosedError:
        """The error of an operation that was in flight when the group was abandoned. Local."""
        return ClosedError(
            f"an operation of the communicator {self._description!r}",
            found="that communicator was abandoned while it was in flight",
            why="It may need a rank that is gone, so that waiting for it might never end.",
            fix="Discard its tensors, and repeat it with the groups of the next generation.",
        )


def _nothing() -> None:
    return None
