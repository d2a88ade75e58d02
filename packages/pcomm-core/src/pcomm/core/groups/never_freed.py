"""References that stay until the process ends."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

__all__ = ["never_freed"]


def never_freed(objects: Iterable[object]) -> None:
    """Keep objects until the process ends, and never run their destructors. Local.

    A list of this module would be emptied when the interpreter ends, and a destructor that waits
    for a rank that is gone would keep the process from ending.

    Args:
        objects: Objects to keep, with all that they refer to.
    """
    for found in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
