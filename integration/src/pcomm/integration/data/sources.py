"""From `data.path` to the files of a corpus."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.config import DataConfig
from pcomm.integration.data.documents import SourceFile, open_file
from pcomm.integration.data.parquet import ParquetFile
from pcomm.integration.data.standard_library import standard_library_files
from pcomm.integration.data.text_files import JsonLinesFile, TextFile

__all__ = ["content_hash", "find_files"]

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
