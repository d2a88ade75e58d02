"""Files of torch.distributed.checkpoint that are hashed while they are written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

__all__ = ["HashingFileSystem", "new_hash"]


def new_hash(content: bytes = b"") -> hashlib.blake2b:
    """A hash of the kind that checkpoints are compared by: BLAKE2b of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16)


class HashingFileSystem(FileSystem):
    """The local file system; knows afterwards the digest of each file that was written through it.

    A file must be written from its beginning to its end, as torch does it.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """Name of a file, without its folder, to the digest of its content."""
        self.error: OSError | None = None
        """What the operating system said when a file could not be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file as torch's own class does."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashing = _HashingStream(cast(IO[bytes], stream))
            try:
                yield cast(io.IOBase, hashing)
            finally:
                self.error = self.error or hashing.error
            self.digests[Path(path).name] = hashing.digest()


class _HashingStream:
    """Passes on what is written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._hash = stream, new_hash()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self._hash.update(content)
        try:
            return self._stream.write(content)
        except OSError as error:
            # torch's writer of archives replaces it by an error of its own.
            self.error = error
            raise

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __getattr__(self, name: str) -> Any:
        # tell, flush, fileno and close: whatever else torch does with a file that it writes.
        if name in ("seek", "truncate", "writelines"):
            raise AttributeError(f"{name}: what is hashed is written in order")
        return getattr(self._stream, name)
