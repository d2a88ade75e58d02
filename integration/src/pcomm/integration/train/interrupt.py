"""Ctrl-C and SIGTERM ask a run to save and stop; they do not tear it apart."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "listen_for_interrupt"]

# A launcher and the terminal may both deliver the same Ctrl-C.
_SAME_REQUEST_S = 2.0


class Interrupt:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.is_requested = False
        self._requested_at = 0.0
        self._ends_at_once = False

    @contextmanager
    def ends_at_once(self) -> Iterator[None]:
        """While there is nothing to save: a request raises KeyboardInterrupt. Local."""
        self._ends_at_once = True
        try:
            if self.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._ends_at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.is_requested and now - self._requested_at > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        if not self.is_requested:
            self.is_requested, self._requested_at = True, now
            if self._ends_at_once:
                raise KeyboardInterrupt


@contextmanager
def listen_for_interrupt() -> Iterator[Interrupt]:
    """Note SIGINT and SIGTERM instead of ending; a second one, later, ends at once. Local.

    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt._request)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
