"""Ends every process that carries a mark in its environment, also where its parent has gone.

    python end_marked.py MARK

waits until its standard input closes, so until the process that holds the other end has ended in
whatever way, and then does it. It needs nothing but the standard library, and starts fast.
"""

import os
import signal
import sys
import time
from contextlib import suppress

__all__ = ["end_marked", "marked"]


def marked(mark: str) -> list[int]:
    """The running processes whose environment was started with `mark` in it. Only Linux tells."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            # Gone meanwhile, or a process of another user.
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def end_marked(mark: str) -> None:
    """Kill these processes, and those that they start meanwhile, until there are none."""
    looks_without = 0
    # One that is just starting a program has no environment for a moment.
    while looks_without < 2:
        pids = marked(mark)
        looks_without = 0 if pids else looks_without + 1
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    sys.stdin.read()
    end_marked(sys.argv[1])
