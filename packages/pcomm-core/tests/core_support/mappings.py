"""Which files of shared memory this process has mapped."""

from __future__ import annotations

import gc
from pathlib import Path

__all__ = ["shared_mappings"]


def shared_mappings() -> frozenset[str]:
    """The mappings of /dev/shm of this process, after a collection.

    Compare two of these by `-`: one that an earlier test left in a cycle, such as the traceback of
    an error that it expected, may end at any moment between them.
    """
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return frozenset(line for line in lines if " /dev/shm/" in line)
