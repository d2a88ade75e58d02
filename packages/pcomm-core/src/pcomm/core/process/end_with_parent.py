"""A process that does not outlive the one that started it."""

from __future__ import annotations

import fcntl
import multiprocessing as mp
import os
import signal
import threading
from multiprocessing import connection

__all__ = ["end_with_parent"]


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
