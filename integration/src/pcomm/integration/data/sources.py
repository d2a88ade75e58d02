"""From `data.path` to files: named ones, folders, globs, and Python's library."""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.readers import (
    COMPRESSED,
    Document,
    JsonLinesFile,
    ParquetFile,
    SourceFile,
    TextFile,
    open_bytes,
)

__all__ = [
    "content_hash",
    "file_times",
    "find_files",
    "find_sources",
    "standard_library_files",
]

_log = logging.getLogger("pcomm.train")

# How long a clock of files may stand still.
_TICK_NS = 2_000_000_000


def find_files(data: DataConfig) -> Sequence[SourceFile]:
    """The files of a corpus, those of all its sources; see `find_sources`."""
    return list(chain.from_iterable(find_sources(data)))


def find_sources(data: DataConfig) -> Sequence[Sequence[SourceFile]]:
    """The files of each source: one for each entry of `data.path` if they have weights, else one.

    Those of a source are sorted by path and counted once, however many patterns match them; an
    empty `data.path` is the standard library. Names are relative to the folder that holds all
    files, so that they do not depend on the machine.

    Raises:
        ConfigError: A path does not exist, a pattern or a folder gives nothing, a file is of no
            known kind, or belongs to two sources.
    """
    if not data.path:
        return [standard_library_files()]
    endings = _endings(data)
    matches = [sorted(set(_expand(pattern, endings))) for pattern in data.path]
    groups = matches if data.weights else [sorted(set(chain.from_iterable(matches)))]
    paths = list(chain.from_iterable(groups))
    if unknown := [path for path in paths if _ending(path) not in endings]:
        raise _unknown_kinds(unknown, endings)
    for path, count in Counter(paths).items() if data.weights else ():
        if count > 1:
            raise _in_two(
                path, [p for p, own in zip(data.path, matches, strict=True) if path in own]
            )
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return [
        [_source(path, path.relative_to(root).as_posix(), data) for path in group]
        for group in groups
    ]


def content_hash(files: Iterable[SourceFile]) -> str:
    """A hash of the names and bytes of all files: equal hashes, equal corpora.

    Raises:
        ConfigError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(hashlib.blake2b(_bytes_of(file.name)).digest())
        with open_bytes(file.path) as content:
            digest.update(hashlib.file_digest(content, hashlib.blake2b).digest())
    return digest.hexdigest()


def file_times(files: Iterable[SourceFile]) -> tuple[str, bool]:
    """A hash of names, sizes and times of change, and whether all are older than two seconds.

    While it stays the same, so does `content_hash`; but a file may change twice in the same tick of
    the clock, so the times of one that has just changed say nothing later.
    """
    digest = hashlib.blake2b(digest_size=16)
    latest = 0
    for file in files:
        with suppress(OSError):  # which is said when it is read
            found = file.path.stat()
            # The second time also tells files apart that have a time of their archive.
            times = found.st_mtime_ns, found.st_ctime_ns
            digest.update(_bytes_of(f"{file.name}\0{found.st_size} {times}\0"))
            latest = max(latest, *times)
    return digest.hexdigest(), latest < time.time_ns() - _TICK_NS


def _bytes_of(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _endings(data: DataConfig) -> tuple[str, ...]:
    """The endings of all files that can be read."""
    plain = (*(suffix.lower() for suffix in data.text_suffixes), ".jsonl")
    return (*plain, ".parquet", *(f"{one}{packed}" for one in plain for packed in COMPRESSED))


def _ending(path: Path) -> str:
    """The ending of a name in lower case, with that of the content where it is compressed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes and suffixes[-1] in COMPRESSED else suffixes[-1:])


def _expand(pattern: str, endings: Sequence[str]) -> list[Path]:
    try:
        return _matches(pattern, endings)
    except (OSError, RuntimeError) as error:  # too long a name, an unknown home
        raise ConfigError(
            f"data.path: {pattern:.200}",
            found=getattr(error, "strerror", None) or str(error),
            why="The path cannot be looked up.",
            fix="Check the path.",
        ) from error


def _matches(pattern: str, endings: Sequence[str]) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [Path(os.path.abspath(path))]
    if path.is_dir():
        return _below(Path(os.path.abspath(path)), pattern, endings)
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


def _below(folder: Path, pattern: str, endings: Sequence[str]) -> list[Path]:
    """The files below a folder that can be read, but for hidden ones and those of runs."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        if Path(parent, "data", "manifest.json").is_file() and "tokenizer.json" in names:
            _log.info("data.path: %s is left out, since it is the folder of a run", parent)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            # A broken link stays, and is an error when it is read.
            if _ending(path) in endings and (path.is_file() or path.is_symlink()):
                found.append(path)
            else:
                others[_ending(path)] += 1
    if not found:
        raise ConfigError(
            f"data.path: {pattern}",
            found=f"a folder without a file that can be read, and {others.total()} others",
            why=f"Files are chosen by their endings: {', '.join(endings)}.",
            fix="Check the folder, or give the endings of plain text as data.text_suffixes.",
        )
    if others:
        _log.info(
            "data.path: left out of %s, since data.text_suffixes does not have the ending: %s",
            folder,
            _counted(others),
        )
    return found


def _source(path: Path, name: str, data: DataConfig) -> SourceFile:
    match _ending(path).split("."):
        case [_, "jsonl", *_]:
            return JsonLinesFile(name, path, data.text_key)
        case [_, "parquet"]:
            return ParquetFile(name, path, data.text_key)
    return TextFile(name, path, data.encoding, data.errors)


def _counted(endings: Counter[str]) -> str:
    return ", ".join(f"{count} in {ending!r}" for ending, count in endings.most_common(10))


def _unknown_kinds(paths: Sequence[Path], endings: Sequence[str]) -> ConfigError:
    found = f"{len(paths)} files with other endings: {_counted(Counter(map(_ending, paths)))}"
    return ConfigError(
        f"data.path: {paths[0]}",
        found=found if len(paths) > 1 else f"a file that ends in {_ending(paths[0])!r}",
        why=f"The ending says how a file is read; known are {', '.join(endings)}.",
        fix="Give the endings of plain text (one document a file) as data.text_suffixes, or narrow "
        "the pattern.",
    )


def _in_two(path: Path, patterns: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"data.path: {path}",
        found=f"a file of {' and of '.join(map(repr, patterns))}",
        why="With data.weights each entry of data.path is a source of its own, and a text of two "
        "would have two shares.",
        fix="Narrow one of the two, or leave data.weights away.",
    )


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
        with open_bytes(self.path) as file:
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
