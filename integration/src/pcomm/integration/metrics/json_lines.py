"""`metrics.jsonl`: one JSON object a row, on disk as soon as it is written."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.atomic_file import atomic_write
from pcomm.integration.metrics.sink import Row

__all__ = ["JsonLinesSink", "read_rows"]


_log = logging.getLogger("pcomm.train")


class JsonLinesSink:
    """Appends rows to a file, one a line, each flushed at once.

    Numbers that JSON has no word for (NaN, infinity) are written as null.

    Args:
        path: The file; its folder must exist.
        keep_through: A resumed run keeps the rows up to this step, which its checkpoint has seen,
            and writes the later ones again. None: a new run, which starts with an empty file.

    Raises:
        ConfigError: A line that must be kept is no row; see `read_rows`.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        kept: list[dict[str, float | None]] = []
        if keep_through is not None and path.exists():
            kept = [row for row in read_rows(path) if (row["step"] or 0) <= keep_through]
        missing = (keep_through or 0) - len({row["step"] for row in kept if "loss" in row})
        if missing > 0:
            _log.warning(
                "%s has no rows of %d of the %d steps before: the file was deleted, or cut off",
                path,
                missing,
                keep_through,
            )
        with atomic_write(path) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)
        self._path = path
        # One write call a line: a crash tears at most the last line.
        self._file = path.open("ab", buffering=0)

    def write(self, row: Row) -> None:
        """Append one row.

        Raises:
            ConfigError: It cannot be written whole, as on a full disk.
        """
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(line)
            problem = "" if written == len(line) else f"{written} of {len(line)} bytes written"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise ConfigError(
                f"metrics file {self._path}",
                found=problem,
                why="Each step adds a row, and a run without them could not be looked at.",
                fix="Make room there; the same command goes on from the newest checkpoint.",
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics file. A last line that a crash has torn off is left out.

    Raises:
        ConfigError: The file cannot be read, or another line is no object with a `step`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"metrics file {path}",
            found=error.strerror or str(error),
            why="The rows of the run are read from it.",
            fix="Give the folder of a run that `pcomm train` wrote.",
        ) from error
    # What follows the last line break is empty, or torn.
    return [_row(line, f"{path}, line {i}") for i, line in enumerate(lines[:-1], start=1)]


def _row(line: bytes, place: str) -> dict[str, float | None]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ConfigError(
            f"metrics file {place}",
            found=f"{line[:60].decode(errors='replace')!r}",
            why="Each line is a JSON object with the key 'step'.",
            fix="Remove the line, or move the file away and resume without the old rows.",
        )
    return row
