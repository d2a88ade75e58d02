"""From `data.path` to documents: text files, JSON lines, Parquet, and Python's library."""

from __future__ import annotations

import codecs
import glob
import hashlib
import importlib
import io
import json
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.integration.config.sections import DataConfig

__all__ = [
    "Document",
    "SourceFile",
    "content_hash",
    "decode",
    "find_files",
    "standard_library_files",
]


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


_KINDS = (".txt", ".jsonl", ".parquet")


def find_files(data: DataConfig) -> Sequence[SourceFile]:
    """The files of a corpus: those of `data.path`, or the standard library where that is empty.

    Files are sorted by path and counted once, however many patterns match them. Their names are
    relative to the folder that holds them all, so that they do not depend on the machine.

    Raises:
        ConfigError: A path does not exist, a pattern matches nothing, or a file is of no known
            kind.
    """
    if not data.path:
        return standard_library_files()
    paths = sorted({path for pattern in data.path for path in _expand(pattern)})
    if unknown := [path for path in paths if path.suffix.lower() not in _KINDS]:
        raise _unknown_kinds(unknown)
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return [_source(path, path.relative_to(root).as_posix(), data.text_key) for path in paths]


def content_hash(files: Sequence[SourceFile]) -> str:
    """A hash of the names and bytes of all files: equal hashes, equal corpora.

    Raises:
        ConfigError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        name = file.name.encode("utf-8", "surrogateescape")
        digest.update(hashlib.blake2b(name).digest())
        with open_file(file.path) as content:
            digest.update(hashlib.file_digest(content, hashlib.blake2b).digest())
    return digest.hexdigest()


def _expand(pattern: str) -> list[Path]:
    try:
        return _matches(pattern)
    except (OSError, RuntimeError) as error:  # too long a name, an unknown home
        raise ConfigError(
            f"data.path: {pattern:.200}",
            found=getattr(error, "strerror", None) or str(error),
            why="The path cannot be looked up.",
            fix="Check the path.",
        ) from error


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [Path(os.path.abspath(path))]
    if path.is_dir():
        raise ConfigError(
            f"data.path: {pattern}",
            found="a folder",
            why="data.path lists files, and a folder may hold more than the corpus.",
            fix=f'Say which files: `data.path = ["{path.as_posix()}/**/*.txt"]`.',
        )
    if path.exists():
        raise _no_file(pattern, path)
    is_glob = glob.has_magic(str(path))
    # Folders that match are skipped; a broken link stays, and is an error when it is read.
    matches = [
        Path(os.path.abspath(match))
        for match in (glob.glob(str(path), recursive=True) if is_glob else [])
        if not os.path.isdir(match)
    ]
    if matches:
        return matches
    if is_glob:
        found, why = "a pattern that matches no file", "The corpus would lack these files."
    else:
        found, why = "no such file", "The corpus would lack this file."
    raise ConfigError(
        f"data.path: {pattern}",
        found=f"{found}, seen from {Path.cwd()}",
        why=why,
        fix=f"Check the path. {_neighbours(path)}",
    )


def _no_file(pattern: str, path: Path) -> ConfigError:
    kinds = (
        (path.is_char_device(), "a device"),
        (path.is_block_device(), "a device"),
        (path.is_fifo(), "a pipe"),
        (path.is_socket(), "a socket"),
    )
    kind = next((name for is_kind, name in kinds if is_kind), "something")
    return ConfigError(
        f"data.path: {pattern}",
        found=f"{kind}, and no regular file",
        why="A corpus is read several times, from its beginning to its end.",
        fix="Write the text to a file, such as text.txt, and name that.",
    )


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder {str(path.parent)!r} either."
    return near_misses(path.name, [entry.name for entry in path.parent.iterdir()][:1000])


def _source(path: Path, name: str, text_key: str) -> SourceFile:
    match path.suffix.lower():
        case ".txt":
            return TextFile(name, path)
        case ".jsonl":
            return JsonLinesFile(name, path, text_key)
    return ParquetFile(name, path, text_key)


def _unknown_kinds(paths: Sequence[Path]) -> ConfigError:
    counts = Counter(path.suffix for path in paths).most_common(10)
    each = ", ".join(f"{count} in {suffix!r}" for suffix, count in counts)
    found = f"{len(paths)} files with other endings: {each}"
    return ConfigError(
        f"data.path: {paths[0]}",
        found=found if len(paths) > 1 else f"a file that ends in {paths[0].suffix!r}",
        why=f"The ending says how a file is read; known are {', '.join(_KINDS)}.",
        fix="Rename plain text to .txt (one document a file), or narrow the pattern.",
    )


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


# What a text begins with that an editor saved in another encoding; the longer ones come first.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


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


@dataclass(frozen=True)
class TextFile:
    """A `.txt` file, which is one document."""

    name: str
    path: Path

    def documents(self) -> Iterator[Document]:
        """The file's text; see `SourceFile.documents`."""
        with open_file(self.path) as file:
            content = file.read()
        yield Document(self.name, decode(content, self.path))


@dataclass(frozen=True)
class JsonLinesFile:
    """A `.jsonl` file: each line an object, whose `text_key` holds the text of a document."""

    name: str
    path: Path
    text_key: str

    def documents(self) -> Iterator[Document]:
        """The text of each line that is not blank; see `SourceFile.documents`."""
        with open_file(self.path) as file:
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
        parquet = _import_parquet(self.path)
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


def _import_parquet(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(
            f"data.path: {path}",
            found=f"a .parquet file, and no pyarrow ({error})",
            why="Parquet files are read with pyarrow, which is not installed here.",
            fix="Run `python3 -m pip install pyarrow`, or convert the file to .jsonl.",
        ) from error


# What is left out, so that two machines with the same Python have the same corpus:
# - installed packages are not the standard library;
# - tests are as long as the library, are packaged apart by some distributions, and hold files
#   that are broken or oddly encoded on purpose;
# - pydoc_data is the language reference as one generated string, not source.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
)

# Written when that Python was built, with that machine's paths in it.
_BUILD_RECORD = "_sysconfigdata"


@dataclass(frozen=True)
class PythonFile:
    """A Python source file, which is one document."""

    name: str
    path: Path

    def documents(self) -> Iterator[Document]:
        """The file's source, in the encoding that it declares; see `SourceFile.documents`."""
        with open_file(self.path) as file:
            content = file.read()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.path: {self.path}",
                found=str(error),
                why="The file belongs to the standard library and is no Python source.",
                fix="Repair this Python installation, or set data.path to files of your own.",
            ) from error
        yield Document(self.name, text)


def standard_library_files(root: Path | None = None) -> list[PythonFile]:
    """The library's modules, sorted by name, without tests, installed packages and build records.

    Args:
        root: The library's folder. That of the running Python if absent.

    Raises:
        ConfigError: There is no source, as in a Python that ships its library compiled or zipped.
    """
    folder = root if root is not None else Path(sysconfig.get_path("stdlib"))
    found: list[PythonFile] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in names:
            if name.endswith(".py") and not name.startswith(_BUILD_RECORD):
                path = Path(parent, name)
                found.append(PythonFile(path.relative_to(folder).as_posix(), path))
    if not found:
        raise ConfigError(
            "data.path",
            found=f"an empty list, and no Python source in {folder}",
            why="An empty data.path means the source of Python's standard library, which this "
            "Python came without.",
            fix="Set data.path to text of your own: `--set 'data.path=[\"texts/*.txt\"]'`.",
        )
    return sorted(found, key=lambda file: file.name)
