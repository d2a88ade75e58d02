"""The collection of the events of one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pcomm.core.trace.event import COMPUTE, Event

__all__ = ["Recorder"]


class Recorder:
    """The events of one rank, in the order in which they ended.

    Several threads may record at once. The default clock is shared by
    all processes of one machine.

    Args:
        rank: Global rank of this process.
        clock: Function that returns a monotonic time in seconds.
        is_on: True to keep events; may be changed at any time.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        is_on: bool = True,
    ) -> None:
        self.rank, self.clock, self.is_on = rank, clock, is_on
        self._events: list[Event] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> tuple[Event, ...]:
        """What was recorded until now."""
        with self._lock:
            return tuple(self._events)

    def add(self, event: Event) -> None:
        """Keep an event, unless `is_on` is false. Local, from any thread."""
        if self.is_on:
            with self._lock:
                self._events.append(event)

    def clear(self) -> None:
        """Forget all events."""
        with self._lock:
            self._events.clear()

    @contextmanager
    def span(self, name: str, queue: str = COMPUTE) -> Iterator[None]:
        """Record the time that the `with` block takes; also one that ends with an error. Local.

        Around work on a GPU this is the time in which the host hands it over.
        """
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(Event("", "", name, 0, start_s, self.clock(), self.rank, queue))
