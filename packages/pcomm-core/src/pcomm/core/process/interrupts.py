"""Lines that a Ctrl-C does not cut in two: it comes after them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["deferred_interrupt"]


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let the handler of SIGINT run at the end of the block, and not within it. Local.

    For a few lines that `KeyboardInterrupt` must find done or not begun. Blocking the signal would
    not do: another thread takes it then, and Python runs the handler in the main thread all the
    same. In other threads no handler runs, so there is nothing to defer.

    A second SIGINT within the block is handled at once, so that a block that hangs can be ended.
    Exceptions from handlers of other signals are not deferred.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Deferring):
        yield
        return
    deferring = _Deferring(handler)
    signal.signal(signal.SIGINT, deferring)
    try:
        yield
    finally:
        deferring.is_over = True
        signal.signal(signal.SIGINT, handler)
        if deferring.has_come:
            handler(signal.SIGINT, None)


class _Deferring:
    """A handler that notes the first signal, and gives the next one to the handler before."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self.has_come = self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.has_come and not self.is_over:
            self._handler(number, frame)
        self.has_come = True
