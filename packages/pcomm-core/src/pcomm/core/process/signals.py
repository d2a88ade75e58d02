"""Signals of ranks: Ctrl-C after a few lines, the end with the parent, and stacks at SIGUSR1."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Deferral", "deferred_interrupt", "end_with_parent", "stacks_of"]


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


def end_with_parent() -> None:
    """End when the process that started this rank is gone, even in the middle of a task.

    That process may end without a message, but it holds the other end of a pipe. On Linux
    the kernel itself kills this rank when that end closes: a thread would not get its turn while
    something in C holds the interpreter's lock. The fork server goes with the last of its ranks.
    """
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if connection.wait([sentinel], 0):
            # It had closed before the kernel knew.
            os._exit(1)
        return

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def stacks_of(pid: int | None, file: Path) -> str:
    """The stacks of a running rank, newest call first. Local; it takes a second at most.

    Args:
        pid: Process of the rank; None for one that never started.
        file: File that the rank writes its stacks to at SIGUSR1, once it is there.
    """
    if pid is None:
        return "  (never started)"
    if not file.exists():
        return "  (has not begun its task)"
    before = size = file.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        # The dump is complete once the file has stopped growing.
        now = file.stat().st_size
        if now > before and now == size:
            return file.read_bytes()[before:].decode(errors="replace").rstrip()
        size = now
        time.sleep(0.02)
    return "  (gave no stack: it is stuck outside Python)"
