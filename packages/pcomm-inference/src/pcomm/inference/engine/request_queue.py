"""The bounded queue of requests that wait."""

from __future__ import annotations

from bisect import insort

from pcomm.core.errors import PcommError
from pcomm.inference.engine.live_request import LiveRequest

__all__ = ["QueueFullError", "RequestQueue"]


class QueueFullError(PcommError):
    """As many requests wait as may; the caller tries again later, or tells its client to."""


class RequestQueue:
    """Requests by priority, then in the order in which they came.

    Args:
        most: Most new requests that wait at once. Preempted ones do not count: they were running.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self) -> list[LiveRequest]:
        """All requests; the list may be kept while the queue changes."""
        return self._waiting.copy()

    def check_room(self, request_id: str) -> None:
        """Refuse a new request while the queue is full.

        Raises:
            QueueFullError: The queue holds its largest number of requests.
        """
        if len(self._waiting) >= self._most:
            raise QueueFullError(
                f"Engine.add: request {request_id!r}",
                found=f"{len(self._waiting)} requests wait, and max_queued is {self._most}",
                why="A queue without a bound only makes every client wait longer.",
                fix="Call step() until some have finished and add it again, or raise max_queued.",
            )

    def insert(self, live: LiveRequest) -> None:
        """Put a request in its place by priority and arrival."""
        insort(self._waiting, live, key=_order)

    def remove(self, live: LiveRequest) -> None:
        """Take a request out, wherever it stands."""
        self._waiting.remove(live)

    def clear(self) -> None:
        """Take all out."""
        self._waiting.clear()


def _order(live: LiveRequest) -> tuple[int, int]:
    return live.order
