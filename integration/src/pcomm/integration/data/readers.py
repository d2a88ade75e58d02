"""Files of a corpus to documents: bytes, compressed or not, plain text, JSON lines and Parquet."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses

__all__ = [
    "COMPRESSED",
    "Document",
    "JsonLinesFile",
    "ParquetFile",
    "SourceFile",
    "TextFile",
    "decoded",
    "open_bytes",
    "open_content",
]

COMPRESSED = (".gz", ".zst")
"""Endings behind that of the content, of files that are read through a decompressor."""

_PIECE = 1 << 14


class Document(NamedTuple):
    """One text that no prediction may look beyond."""

    name: str
    """Where it stands, relative to the corpus: the same on every machine with these files."""

    text: str

    is_record: bool = False
    """Whether it is one of many in a file, where its place says nothing about it."""

    is_whole: bool = True
    """False if bytes of the file were replaced or left out, since they are not in its encoding."""

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
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """A file of the corpus, open for reading its bytes as they are.

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


@contextmanager
def open_content(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file as `open_bytes` does, and decompress it if its name ends in one of `COMPRESSED`.

    Raises:
        ConfigError: For the reasons of `open_bytes`, or the compressed content is cut or damaged.
        UnsupportedError: It is a .zst file, and zstandard is not installed.
    """
    suffix = path.suffix.lower()
    with open_bytes(path) as file:
        if suffix not in COMPRESSED:
            yield file
            return
        zstd = None
        if suffix == ".zst":
            zstd = _imported("zstandard", path, otherwise="compress the file with gzip")
        content: io.BufferedIOBase = (
            io.BufferedReader(_ZstdReader(file, zstd)) if zstd else gzip.GzipFile(fileobj=file)
        )
        # zstd has an error of its own, which is of no other kind.
        failures = (EOFError, zlib.error, gzip.BadGzipFile, *([zstd.ZstdError] if zstd else []))
        try:
            yield content
        except failures as error:
            raise ConfigError(
                f"data.path: {path}",
                found=f"compressed text that is cut or damaged: {error}",
                why="What comes after that place is lost, and the corpus would lack it.",
                fix="Get or compress the file again, or take it out of data.path.",
            ) from error


class _ZstdReader(io.RawIOBase):
    """The content of a .zst file. Unlike the library's own reader it notices that a file is cut."""

    def __init__(self, file: io.BufferedReader, zstd: Any) -> None:
        self._file, self._zstd = file, zstd
        self._frame: Any = None
        self._left = b""
        self._decoded = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoded:
            piece = self._left or self._file.read(_PIECE)
            if not piece:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            self._decoded = memoryview(self._frame.decompress(piece))
            self._left = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        length = min(len(buffer), len(self._decoded))
        buffer[:length] = self._decoded[:length]
        self._decoded = self._decoded[length:]
        return length


def _imported(module: str, path: Path, *, otherwise: str) -> Any:
    """An optional library that reads files of this ending; `otherwise` is what to do without it."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"data.path: {path}",
            found=f"a {path.suffix.lower()} file, and no {library} ({error})",
            why=f"Such files are read with the library {library}, which is not installed here.",
            fix=f"Run `python3 -m pip install {library}`, or {otherwise}.",
        ) from error


# What a text begins with that says how it is written; the longer ones come first.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}


def decoded(content: bytes, path: Path, encoding: str, errors: str) -> tuple[str, bool]:
    """The text of a file's bytes, and whether all of them are in the encoding.

    Args:
        content: All bytes of the file.
        path: The file, for errors.
        encoding: Python's name of the encoding. Under UTF-8 a byte order mark at the beginning
            decides instead; it is no part of the text.
        errors: The argument `errors` of `bytes.decode`.

    Raises:
        ConfigError: A byte is not in the encoding, under "strict"; names its line. Or the text is
            UTF-16 without a mark, which has the form of UTF-8 with a zero beside each letter.
    """
    name = codecs.lookup(encoding).name
    if name == "utf-8":
        name = next((own for mark, own in _MARKS.items() if content.startswith(mark)), name)
    try:
        text = content.decode(name)
    except UnicodeDecodeError as error:
        if errors != "strict":
            return content.decode(name, errors), False
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"data.path: {path}",
            found=f"the byte 0x{content[error.start]:02x} in line {line}, which is no {name}",
            why="A guess at the encoding of a text would train on garbage.",
            fix="Say how these files are written, for example data.encoding = 'cp1252' or "
            "'latin-1'; or convert this one, as with `iconv -f cp1252 -t utf-8`; or set "
            "data.errors = 'replace'.",
        ) from error
    if name == "utf-8" and "\0" in text and (other := _wide(content)) is not None:
        raise ConfigError(
            f"data.path: {path}",
            found=f"a zero in every second byte, as {other} has it, and no byte order mark",
            why="As UTF-8 each letter would be followed by a control character.",
            fix=f"Set data.encoding = '{other}', or convert it with `iconv -f {other} -t utf-8`.",
        )
    return text, True


def _wide(content: bytes) -> str | None:
    """The kind of UTF-16 that a content with zeros looks like."""
    half = len(content) // 2
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if 2 * content[first::2].count(0) > half > 2 * content[1 - first :: 2].count(0):
            return name
    return None


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
            fix="Write it again from its original text.",
        ) from error
    return value


@dataclass(frozen=True)
class TextFile:
    """A file of plain text, which is one document."""

    name: str
    path: Path
    encoding: str = "utf-8"
    errors: str = "strict"

    def documents(self) -> Iterator[Document]:
        """The file's text; see `SourceFile.documents`."""
        with open_content(self.path) as file:
            content = file.read()
        text, is_whole = decoded(content, self.path, self.encoding, self.errors)
        # Encodings with escapes, such as utf-7, can say what no text has.
        checked_text(text, place=str(self.path), key="")
        yield Document(self.name, text, is_whole=is_whole)


@dataclass(frozen=True)
class JsonLinesFile:
    """A `.jsonl` file: each line an object, whose `text_key` holds the text of a document."""

    name: str
    path: Path
    text_key: str

    def documents(self) -> Iterator[Document]:
        """The text of each line that is not blank; see `SourceFile.documents`."""
        with open_content(self.path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{self.path}, line {number}"
                    text = self._text(line, place)
                    yield Document(f"{self.name}:{number}", text, is_record=True)

    def _text(self, line: bytes, place: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
            raise ConfigError(
                f"data.path: {place}",
                found=f"no JSON: {error}",
                why="Each line of a .jsonl file is one JSON object.",
                fix="Repair or remove the line.",
            ) from error
        if not isinstance(record, dict) or self.text_key not in record:
            known = sorted(record) if isinstance(record, dict) else []
            raise ConfigError(
                f"data.path: {place}",
                found=f"no key {self.text_key!r}; its keys are {known}"
                if known
                else f"no key {self.text_key!r} in {line[:60].decode(errors='replace')!r}",
                why="data.text_key names the key that holds the text of each line's object.",
                fix=f"Set data.text_key. {near_misses(self.text_key, known)}",
            )
        return checked_text(record[self.text_key], place=place, key=self.text_key)


# pyarrow is optional and comes without types, so what it gives is `Any` here.


@dataclass(frozen=True)
class ParquetFile:
    """A `.parquet` file whose column `text_key` holds the text of a document in each row."""

    name: str
    path: Path
    text_key: str

    def documents(self) -> Iterator[Document]:
        """The text of each row, read batch by batch; see `SourceFile.documents`.

        Raises:
            UnsupportedError: pyarrow is not installed.
        """
        parquet = _imported("pyarrow.parquet", self.path, otherwise="convert the file to .jsonl")
        row = 0
        with self._open(parquet) as file:
            columns = list(file.schema_arrow.names)
            if self.text_key not in columns:
                raise ConfigError(
                    f"data.path: {self.path}",
                    found=f"no column {self.text_key!r}; its columns are {columns}",
                    why="data.text_key names the column that holds the text.",
                    fix=f"Set data.text_key. {near_misses(self.text_key, columns)}",
                )
            for batch in file.iter_batches(batch_size=1024, columns=[self.text_key]):
                for value in batch.column(0).to_pylist():
                    place = f"{self.path}, row {row}"
                    text = checked_text(value, place=place, key=self.text_key)
                    yield Document(f"{self.name}:{row}", text, is_record=True)
                    row += 1

    def _open(self, parquet: Any) -> Any:
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise ConfigError(
                f"data.path: {self.path}",
                found=str(error),
                why="The file belongs to the corpus and cannot be read as parquet.",
                fix="Check the path and its permissions, or take it out of data.path.",
            ) from error
