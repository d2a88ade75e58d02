"""A call that may never return, made on a thread that is left behind when a rank fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pcomm.ntp.session.suspicion import attempted

__all__ = ["wait_or_leave"]

_PAUSE_S = 0.002
T = TypeVar("T")


def wait_or_leave(
    call: Callable[[], T], check: Callable[[], None], undo: Callable[[T], None], name: str
) -> T:
    """The result of `call`, unless `check` raises before.

    Connecting to a process that dies at that moment ends with the time-out of the communicator
    alone, and nothing interrupts it. So it is done on a daemon thread.

    Args:
        call: Function that may block. Its errors are raised here.
        check: Function called every few milliseconds; what it raises leaves the call behind.
        undo: Function called with the result if that comes after all; on the other thread.
        name: Name of the thread.

    Raises:
        SuspectedFailure: `call` raised an error of torch's.
    """
    task = _Task(call, undo)
    threading.Thread(target=task.run, name=name, daemon=True).start()
    while not task.ended.wait(_PAUSE_S):
        try:
            check()
        except BaseException:
            task.leave()
            raise
    return attempted("Session: connecting the ranks of a generation", task.result)


class _Task(Generic[T]):
    """A call, its outcome, and whether anything still waits for that."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], None]) -> None:
        self._call, self._undo = call, undo
        self._lock = threading.Lock()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._is_left = False
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            found = self._call()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                self._found.append(found)
                is_left = self._is_left
            if is_left:
                self._undo(self._found.pop())
        self.ended.set()

    def leave(self) -> None:
        with self._lock:
            self._is_left = True
            found = self._found[:]
            self._found.clear()
        for one in found:
            self._undo(one)

    def result(self) -> T:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found.pop()
