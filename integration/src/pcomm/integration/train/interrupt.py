"""Ctrl-C and SIGTERM ask a run to save and stop; they do not tear it apart."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "listen_for_interrupt", "terminate_as_interrupt"]

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
    with _handled_by(interrupt._request, signal.SIGINT, signal.SIGTERM):
        yield interrupt


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM, too. Local; main thread only, as above."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt, signal.SIGTERM):
        yield


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
