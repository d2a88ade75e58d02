"""Documents as token ids on disk: written once, then mapped into memory by every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from pcomm.integration.files import atomic_write

__all__ = ["TokenCorpus", "open_tokens", "write_tokens"]


@dataclass(frozen=True)
class TokenCorpus:
    """The documents of one split, one after the other; each ends with the end token."""

    tokens: NDArray[np.unsignedinteger]
    """`[num_tokens]`, uint16 or uint32, usually mapped from a file."""

    offsets: NDArray[np.int64]
    """`[num_documents + 1]`: document d is `tokens[offsets[d]:offsets[d + 1]]`."""

    bytes_per_id: NDArray[np.int32]
    """`[vocabulary]`, bytes of text that each id stands for."""

    end_id: int
    """Id of the end token."""

    source_documents: tuple[int, ...] = ()
    """Documents of each source, one source after the other; empty where all are one."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, ends included."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def sources(self) -> list[TokenCorpus]:
        """The documents of each source, with the same tokens."""
        ends = np.cumsum([0, *(self.source_documents or (self.num_documents,))]).tolist()
        return [
            replace(self, offsets=self.offsets[start : stop + 1], source_documents=())
            for start, stop in pairwise(ends)
        ]


class TokenWriter:
    """Appends documents to the files of one split; see `write_tokens`."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = dtype
        self.offsets = [0]
        self._header_bytes = self._write_header()

    def append(self, ids: Sequence[int]) -> None:
        """Add one document, which must end with the end token."""
        self._file.write(np.array(ids, dtype=self._dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))

    def finish(self) -> None:
        """Put the final length into the file's header."""
        self._file.seek(0)
        # numpy pads a header for the growth of the first axis, so it does not reach the tokens.
        assert self._write_header() == self._header_bytes
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> int:
        header = {
            "descr": npy.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.offsets[-1],),
        }
        npy.write_array_header_1_0(self._file, header)
        return self._file.tell()


@contextmanager
def write_tokens(folder: Path, split: str, vocabulary: int) -> Iterator[TokenWriter]:
    """A writer whose files appear in `folder` when the block ends well.

    The tokens go to disk as they come, so a corpus may be larger than the memory.
    """
    dtype: np.dtype[np.unsignedinteger] = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    with atomic_write(folder / f"{split}_tokens.npy") as file:
        writer = TokenWriter(file, dtype)
        yield writer
        writer.finish()
    with atomic_write(folder / f"{split}_offsets.npy") as file:
        np.save(file, np.array(writer.offsets, dtype=np.int64))


def open_tokens(
    folder: Path,
    split: str,
    bytes_per_id: NDArray[np.int32],
    end_id: int,
    source_documents: tuple[int, ...] = (),
) -> TokenCorpus:
    """The tokens of a split, mapped into memory.

    Raises:
        OSError: A file is missing or unreadable.
        ValueError: A file is damaged: no array, or not as long as the offsets say.
    """
    offsets = _load(folder / f"{split}_offsets.npy", "i", None)
    tokens = _load(folder / f"{split}_tokens.npy", "u", "r")
    if offsets.ndim != 1 or tokens.shape != (offsets[-1],):
        raise ValueError(f"{split}_tokens.npy holds {tokens.shape} tokens, not {offsets[-1:]}")
    return TokenCorpus(tokens, offsets, bytes_per_id, end_id, source_documents)


def _load(path: Path, kind: str, mode: Literal["r"] | None) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode=mode)
    except OSError:
        raise
    # numpy reads a header with Python's own parser, which fails in many ways.
    except Exception as error:
        raise ValueError(f"{path.name}: {error or 'an empty file'}") from error
    if array.dtype.kind != kind:
        raise ValueError(f"{path.name}: numbers of dtype {array.dtype}")
    return array
