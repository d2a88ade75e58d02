"""Plain text, one document a file, and JSON lines, one document a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.data.documents import Document, checked_text, decode, open_file

__all__ = ["JsonLinesFile", "TextFile"]


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
