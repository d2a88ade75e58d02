"""Parquet files, one document a row; needs pyarrow, which is an optional dependency."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.integration.data.documents import Document, checked_text

__all__ = ["ParquetFile"]

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
