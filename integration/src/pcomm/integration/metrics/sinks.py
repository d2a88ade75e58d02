"""All places where the rows of a run go, as one; and rows that ranks take turns in writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TextIO

from pcomm.core import PcommError
from pcomm.integration.config.sections import Config
from pcomm.integration.metrics.progress import ProgressSink
from pcomm.integration.metrics.rows import JsonLinesSink, Row, is_evaluation, read_rows
from pcomm.integration.metrics.trackers import open_tensorboard, open_wandb

__all__ = ["SharedRows", "Sink", "SinkGroup", "open_sinks"]


class Sink(Protocol):
    """Where rows go. Only the first rank of a run writes any."""

    def write(self, row: Row) -> None:
        """Take one row; the steps of a run never fall."""

    def close(self) -> None:
        """Finish; no row comes after it."""


class SinkGroup:
    """Several sinks as one. Without any it takes rows and keeps none, as on all other ranks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self.error: PcommError | None = None
        """The first failure of a sink: all ranks stop together, and save, before it is raised."""

    def write(self, row: Row) -> None:
        """Give the row to each sink in order, until one of them has failed."""
        if self.error is None:
            try:
                for sink in self._sinks:
                    sink.write(row)
            except PcommError as error:
                self.error = error

    def close(self) -> None:
        """Close every sink, also after one of them fails; then raise that failure."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def open_sinks(
    run_dir: Path,
    *,
    rank: int,
    total_steps: int,
    stream: TextIO,
    keep_through: int | None = None,
    config: Config | None = None,
) -> SinkGroup:
    """All sinks of a run on rank 0: file, progress line, and what is installed. Else none.

    Args:
        run_dir: Folder of `metrics.jsonl` and `tensorboard/`. Must exist on rank 0.
        rank: This process's rank in the world.
        total_steps: The step that ends the run.
        stream: Stream of the progress line.
        keep_through: The step that a resumed run goes on from; None for a new run.
        config: Configuration, whose `[metrics]` may name others; None for no others.

    Raises:
        ConfigError: The metrics of the run to resume are damaged.
    """
    if rank:
        return SinkGroup()
    sinks: list[Sink] = [
        JsonLinesSink(run_dir / "metrics.jsonl", keep_through=keep_through),
        ProgressSink(stream, total_steps=total_steps, first_step=keep_through or 0),
    ]
    others = [open_tensorboard(run_dir / "tensorboard", keep_through=keep_through)]
    if config is not None:
        others.append(open_wandb(run_dir, config, keep_through=keep_through))
    return SinkGroup([*sinks, *filter(None, others)])


_KINDS = ("loss", "bits_per_byte")


class SharedRows:
    """Writes each step's row once, whichever rank writes it, and each evaluation's.

    A step may be applied while the rank that writes dies, or leaves its operation with an error. So
    every rank notes the row before a step is applied, and whichever rank writes in the next
    generation adds it if it is missing. Where the run goes back to a checkpoint, the rows of the
    steps that it repeats are removed.

    A process that has just joined noted nothing, so that `noted_step` decides who writes.

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

    @property
    def noted_step(self) -> int:
        """Step of the newest row that this rank has noted; -1 before the first."""
        return -1 if self._noted is None else int(self._noted["step"])

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


def _kind(row: Mapping[str, object]) -> str:
    return _KINDS[is_evaluation(row)]
