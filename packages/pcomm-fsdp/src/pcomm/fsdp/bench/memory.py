"""Peak of all memory that a training takes, as the C library counts it.

Torch's own accounts see one thread, and no staging buffers of gloo. `mallinfo2` sees every block in
use, of all libraries and threads. With one row in the batch there are next to no
activations, so what is left is parameters, gradients and buffers.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

__all__ = ["can_count", "in_use_bytes", "peak_bytes"]

_PERIOD_S = 2e-4


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library, 2.33 or newer."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def can_count() -> bool:
    """True if this process's C library tells."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def in_use_bytes() -> int:
    """Bytes of all blocks in use, mapped ones included. Local."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def peak_bytes(run: Callable[[], object], base_bytes: int) -> int:
    """The most that is in use while `run` runs, above `base_bytes`; looked at every 0.2 ms."""
    found = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            found[0] = max(found[0], in_use_bytes())
            time.sleep(_PERIOD_S)

    gc.collect()
    watcher = threading.Thread(target=watch, name="memory", daemon=True)
    watcher.start()
    try:
        run()
    finally:
        is_over.set()
        watcher.join()
    return found[0] - base_bytes
