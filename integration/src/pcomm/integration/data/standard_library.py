"""The corpus that is on every machine: the source of the running Python's standard library."""

from __future__ import annotations

import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.data.documents import Document, open_file

__all__ = ["PythonFile", "standard_library_files"]

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
