"""What a source yields: documents, and the errors that every kind of file shares."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from pcomm.core.errors import ConfigError

# What a text begins with that an editor saved in another encoding; the longer ones come first.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

__all__ = ["Document", "SourceFile", "checked_text", "decode", "open_file"]


class Document(NamedTuple):
    """One text that no prediction may look beyond."""

    name: str
    """Where it stands, relative to the corpus: the same on every machine with these files."""

    text: str

    is_record: bool = False
    """Whether it is one of many in a file, where its place says nothing about it."""

    @property
    def key(self) -> str:
        """What decides its side of the held-out split: its file's name, or a record's content."""
        if not self.is_record:
            return self.name
        # Not the text itself, since the keys of all documents are kept at once.
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16).hexdigest()


class SourceFile(Protocol):
    """One file of a corpus."""

    @property
    def name(self) -> str:
        """The file's path relative to the corpus, with forward slashes."""

    @property
    def path(self) -> Path:
        """Where the file lies on this machine."""

    def documents(self) -> Iterator[Document]:
        """The file's documents in order, empty ones included.

        Raises:
            ConfigError: The file cannot be read, or does not hold what its kind promises.
        """


@contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader]:
    """A file of the corpus, open for reading bytes.

    Raises:
        ConfigError: The file is missing or cannot be read, now or within the block.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"data.path: {path}",
            found=error.strerror or str(error),
            why="The file belongs to the corpus and cannot be read.",
            fix="Check the path and its permissions, or take it out of data.path.",
        ) from error


def decode(content: bytes, path: Path) -> str:
    """The text of a file's bytes, which must be UTF-8.

    Raises:
        ConfigError: The bytes are no UTF-8; names the line.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        marked = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
        found = f"the byte 0x{content[error.start]:02x} in line {line}, which is no UTF-8"
        fix = f"Convert it, for example with `iconv -f latin1 -t utf-8 {path.name}`."
        if marked is not None:
            found = f"the byte order mark of {marked}, which is no UTF-8"
            fix = f"Convert it with `iconv -f {marked.lower()} -t utf-8 {path.name}`."
        raise ConfigError(
            f"data.path: {path}",
            found=found,
            why="Text is read as UTF-8, and a guess at another encoding would train on garbage.",
            fix=fix,
        ) from error


def checked_text(value: object, *, place: str, key: str) -> str:
    """A document's text as a record gives it, if it is a string that UTF-8 can hold.

    Raises:
        ConfigError: It is another type, or holds half of a surrogate pair; names `place`.
    """
    if not isinstance(value, str):
        raise ConfigError(
            f"data.path: {place}",
            found=f"the key {key!r} holds {value!r:.60}, a {type(value).__name__}",
            why="The text of a document is a string.",
            fix="Repair the record, or name the key of the text with data.text_key.",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"data.path: {place}",
            found=f"the character {value[error.start]!r} in the text",
            why="It is one half of a surrogate pair, which no UTF-8 text can hold.",
            fix="Write the record again from its original text.",
        ) from error
    return value
