"""Files that appear whole or not at all, whenever the process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_write"]


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write that takes the place of `path` when the block ends well.

    Until then, and after an error, `path` is what it was. A reader that has the old file open
    keeps the old content. The folder of `path` must exist.
    """
    # The process id keeps two writers of one path apart; the last to end wins.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
