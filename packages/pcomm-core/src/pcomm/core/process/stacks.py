"""The stacks of another process that runs or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["stacks_of"]


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
