"""One thread at a time: calls of a second one are refused."""

from __future__ import annotations

import threading

from pcomm.core.errors import UnsupportedError

__all__ = ["claim"]


def claim(callers: dict[str, threading.Thread], what: str) -> None:
    """Begin a call that one thread at a time may make. Local.

    The owner of the mapping puts an empty one in its place when the call ends. An interrupt right
    after `claim` leaves the claim to its thread, whose next call ends it.

    Args:
        callers: An empty mapping, or that of a call under way.
        what: The object that is called, for the error.

    Raises:
        UnsupportedError: Another thread is within a call.
    """
    # One operation for all threads: the first one gets its entry.
    owner = callers.setdefault("caller", threading.current_thread())
    if owner is not threading.current_thread():
        raise UnsupportedError(
            f"{what}: a call in thread {threading.current_thread().name!r}",
            found=f"a call under way in thread {owner.name!r}",
            why="Requests belong to the thread that reads their texts, which makes the steps.",
            fix="Call it from one thread at a time, with a lock; or use `pcomm serve`, which has "
            "a thread of its own for the steps.",
        )
