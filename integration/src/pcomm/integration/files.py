"""Files that are whole or not there, and the hash by which they are compared. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_write", "new_hash"]


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


def new_hash(content: bytes = b"") -> hashlib.blake2b:
    """A hash of the kind that checkpoints are compared by: BLAKE2b of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16)
