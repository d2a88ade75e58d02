"""Rows of a run: to JSON lines, the terminal, TensorBoard and several ranks, and as a picture."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TextIO

from pcomm.core import PcommError
from pcomm.core.errors import ConfigError
from pcomm.integration.files import atomic_write

__all__ = [
    "JsonLinesSink",
    "ProgressSink",
    "Row",
    "SharedRows",
    "Sink",
    "SinkGroup",
    "TensorBoardSink",
    "draw_loss",
    "duration",
    "open_sinks",
    "open_tensorboard",
    "plot_loss",
    "read_rows",
]


Row = Mapping[str, int | float]
"""The numbers of one step. Each row has `step`.

A training row also has `loss` (mean nats per token), `tokens_per_s`, `mean_tokens_per_s` (of the
last 20 steps), `step_ms`, `data_ms` (of it, for the batch), `mfu` (share of the peak, where that is
known), `lr`, `grad_norm`, `memory_mib` (allocated between two steps) and `peak_memory_mib`; an
evaluation row has `bits_per_byte` and `eval_s`.
"""


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


class TensorBoardSink:
    """Each number of a row as a scalar of its name.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or what has its two methods.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, row: Row) -> None:
        """Add every number but the step, at that step."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()


def open_tensorboard(folder: Path, *, keep_through: int | None = None) -> TensorBoardSink | None:
    """A sink that writes event files to `folder`, or None where TensorBoard is not installed.

    Args:
        folder: Made if absent.
        keep_through: A resumed run hides the rows of an earlier attempt after this step.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        logging.getLogger("pcomm").warning(
            "TensorBoard is installed and cannot be imported (%s); metrics.jsonl has every row.",
            error,
        )
        return None
    purge_step = None if keep_through is None else keep_through + 1
    return TensorBoardSink(module.SummaryWriter(str(folder), purge_step=purge_step))


class ProgressSink:
    """Shows the newest training row: on a terminal in one line that is rewritten, else in lines.

    Args:
        stream: Stream to write to, for example `sys.stderr`.
        total_steps: The step that ends the run.
        first_step: Steps that were done before this process began.
        every_s: Seconds between lines where the stream is no terminal.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        first_step: int = 0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._total_steps = total_steps
        self._first_step = first_step
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._last_line = -math.inf
        self._bits_per_byte: float | None = None
        self._shown = ""

    def write(self, row: Row) -> None:
        """Show a training row; remember the bits per byte of an evaluation row."""
        if "bits_per_byte" in row:
            self._bits_per_byte = row["bits_per_byte"]
        if "loss" not in row:
            return
        now = self._clock()
        line = self._line(row, now)
        if self._is_terminal:
            # Blanks cover what is left of a longer line before.
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._stream.flush()
        elif row["step"] == self._total_steps or now - self._last_line >= self._every_s:
            self._stream.write(line + "\n")
            self._stream.flush()
            self._last_line = now
        self._shown = line

    def close(self) -> None:
        """End the line, so that what follows begins on its own."""
        if self._is_terminal and self._shown:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, row: Row, now: float) -> str:
        step = int(row["step"])
        done = step - self._first_step
        parts = [
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}",
            f"loss {row['loss']:.3f}",
        ]
        if self._bits_per_byte is not None:
            parts.append(f"held-out {self._bits_per_byte:.3f} bits/byte")
        # Of one step they jump, on a machine that others use.
        if (speed := row.get("mean_tokens_per_s", row.get("tokens_per_s"))) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"{row['mfu']:.1%} of peak")
        if done > 0:
            # The mean since the start, so evaluations and checkpoints to come are counted in.
            left = (now - self._start) / done * (self._total_steps - step)
            parts.append(f"ETA {duration(left)}")
        if "memory_mib" in row:
            parts.append(f"{row['memory_mib']:,.0f} MiB in use")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def open_sinks(
    run_dir: Path, *, rank: int, total_steps: int, stream: TextIO, keep_through: int | None = None
) -> SinkGroup:
    """All sinks of a run on rank 0: file, progress line, TensorBoard if installed. Else none.

    Args:
        run_dir: Folder of `metrics.jsonl` and `tensorboard/`. Must exist on rank 0.
        rank: This process's rank in the world.
        total_steps: The step that ends the run.
        stream: Stream of the progress line.
        keep_through: The step that a resumed run goes on from; None for a new run.

    Raises:
        ConfigError: The metrics of the run to resume are damaged.
    """
    if rank:
        return SinkGroup()
    sinks: list[Sink] = [
        JsonLinesSink(run_dir / "metrics.jsonl", keep_through=keep_through),
        ProgressSink(stream, total_steps=total_steps, first_step=keep_through or 0),
    ]
    tensorboard = open_tensorboard(run_dir / "tensorboard", keep_through=keep_through)
    return SinkGroup([*sinks, tensorboard] if tensorboard else sinks)


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


def draw_loss(run_dir: Path) -> None:
    """Draw `loss.png` of a run, or warn that it cannot be written: the run has ended well."""
    try:
        plot_loss(run_dir / "metrics.jsonl", run_dir / "loss.png")
    except OSError as error:
        _log.warning("no picture of the loss: %s", error)


def plot_loss(metrics: Path, image: Path) -> None:
    """Draw a PNG of the rows in `metrics`: training loss on the left axis, bits per byte right.

    Needs no display. A file without rows gives an empty picture.

    Raises:
        ConfigError: `metrics` cannot be read; see `read_rows`.
    """
    # Imported here: it takes longer than all else in this package, and runs once at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(metrics)
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    left.set_xlabel("step")
    left.set_ylabel("training loss, nats per token", color="tab:blue")
    left.plot(*_curve(rows, "loss"), color="tab:blue", linewidth=1)
    left.grid(alpha=0.3)
    right = left.twinx()
    right.set_ylabel("held-out bits per byte", color="tab:orange")
    right.plot(*_curve(rows, "bits_per_byte"), color="tab:orange", marker="o")
    with atomic_write(image) as file:
        figure.savefig(file, format="png")


def _curve(rows: list[dict[str, float | None]], key: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [float(step or 0) for step, _ in points], [float(value or 0) for _, value in points]
