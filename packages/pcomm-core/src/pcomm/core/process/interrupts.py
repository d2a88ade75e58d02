"""Lines that a Ctrl-C does not cut in two: it comes after them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Deferral", "deferred_interrupt"]

T = TypeVar("T")


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Deferral]:
    """Let the handler of SIGINT run at the end of the block, and not within it. Local.

    For a few lines that `KeyboardInterrupt` must find done or not begun. Blocking the signal would
    not do: another thread takes it then, and Python runs the handler in the main thread all the
    same. In other threads no handler runs, so there is nothing to defer.

    A second SIGINT within the block is handled at once, so that a block that hangs can be ended.
    Exceptions from handlers of other signals are not deferred.

    Yields:
        The deferral, whose `heard` makes one call within the block at which the handler runs.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, Deferral):
        yield Deferral(lambda *_: None)
        return
    deferring = Deferral(handler)
    signal.signal(signal.SIGINT, deferring)
    try:
        yield deferring
    finally:
        deferring.is_over = True
        signal.signal(signal.SIGINT, handler)
        if deferring.has_come:
            handler(signal.SIGINT, None)


class Deferral:
    """A handler that notes the first signal, and gives the next one to the handler before.

    Args:
        handler: The handler before.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._is_heard = False
        self.has_come = self.is_over = False

    def heard(self, call: Callable[[], T]) -> T:
        """What `call` returns; a signal that came before it, or comes during it, is handled. Local.

        For the long part of a block that may be cut short. Within another deferred block signals
        stay deferred.
        """
        self._is_heard = True
        try:
            if self.has_come:
                self.has_come = False
                self._handler(signal.SIGINT, None)
            return call()
        finally:
            self._is_heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or hand it to the handler before."""
        if self._is_heard or (self.has_come and not self.is_over):
            self._handler(number, frame)
            return
        self.has_come = True
