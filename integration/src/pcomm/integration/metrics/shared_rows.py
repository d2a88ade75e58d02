"""Rows of a run whose ranks come and go: one of them writes, and another one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from pcomm.core import PcommError
from pcomm.integration.metrics.json_lines import read_rows
from pcomm.integration.metrics.run_sinks import open_sinks
from pcomm.integration.metrics.sink import Row, SinkGroup

__all__ = ["SharedRows"]

_KINDS = ("loss", "bits_per_byte")


class SharedRows:
    """Writes each step's row once, whichever rank writes it, and each evaluation's.

    A step may be applied while the rank that writes dies, or leaves its operation with an error. So
    every rank notes the row before a step is applied, and whichever rank writes in the next
    generation adds it if it is missing. Where the run goes back to a checkpoint, the rows of the
    steps that it repeats are removed.

    A row is lost if the rank that is to add it is a process that has just joined: it noted nothing.

    Args:
        run_dir: Folder of the run, which all ranks share.
        total_steps: The step that ends the run.
        stream: Stream of the progress line.

    Attributes:
        is_writer: True while this rank is the one that writes.
    """

    def __init__(self, run_dir: Path, *, total_steps: int, stream: TextIO) -> None:
        self._run_dir, self._total_steps, self._stream = run_dir, total_steps, stream
        self._sinks = SinkGroup()
        self.is_writer = False
        self._noted: Row | None = None
        # The newest step of which there is a row of each kind, as far as this rank writes them.
        self._newest = dict.fromkeys(_KINDS, 0)

    @property
    def error(self) -> PcommError | None:
        """The first failure of a sink; no row is written after it."""
        return self._sinks.error

    def enter(self, step: int, *, is_writer: bool) -> None:
        """Begin a generation. Local.

        Args:
            step: Number of steps that are done.
            is_writer: True if this rank is the one that writes; on one rank of a generation.

        Raises:
            ConfigError: The rows that are there are damaged.
        """
        if is_writer != self.is_writer or max(self._newest.values()) > step:
            self._reopen(step, is_writer=is_writer)
        if self._noted is not None and self._noted["step"] == step:
            self.write(self._noted)

    def note(self, row: Row) -> None:
        """Keep the row of a step that is about to be applied. Local; on all ranks."""
        self._noted = row

    def write(self, row: Row) -> None:
        """Write a row that is not there yet, if this rank is the one that writes. Local."""
        kind = _kind(row)
        if self.is_writer and row["step"] > self._newest[kind]:
            self._sinks.write(row)
            self._newest[kind] = int(row["step"])

    def close(self) -> None:
        """Close the sinks. Local."""
        self._sinks.close()

    def _reopen(self, step: int, *, is_writer: bool) -> None:
        """Take over the rows up to `step`, or leave them to another rank."""
        self.close()
        self.is_writer, self._newest = is_writer, dict.fromkeys(_KINDS, 0)
        self._sinks = open_sinks(
            self._run_dir,
            rank=0 if is_writer else 1,
            total_steps=self._total_steps,
            stream=self._stream,
            keep_through=step or None,
        )
        if is_writer:
            for row in read_rows(self._run_dir / "metrics.jsonl"):
                self._newest[_kind(row)] = int(row["step"] or 0)


def _kind(row: Row | dict[str, float | None]) -> str:
    return _KINDS["loss" not in row]
