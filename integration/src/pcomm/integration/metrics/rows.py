"""What the rows of a run hold, and the file that keeps them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pcomm.core.errors import ConfigError
from pcomm.integration.files import atomic_write

__all__ = [
    "FIELDS",
    "JsonLinesSink",
    "Row",
    "RowField",
    "bits_per_byte",
    "is_evaluation",
    "read_rows",
    "tagged",
]

_log = logging.getLogger("pcomm.train")

Row = Mapping[str, int | float]
"""The numbers of one step by the names of `FIELDS`: those of training, or of an evaluation."""


class RowField(NamedTuple):
    """One number of a row."""

    tag: str
    """Its name in TensorBoard and Weights & Biases, which group numbers by what is before `/`."""

    meaning: str
    """What it is, with its unit."""


FIELDS: Mapping[str, RowField] = MappingProxyType(
    {
        "step": RowField("step", "Optimizer steps that are done. In every row."),
        "loss": RowField("train/loss", "Mean loss of the targets of the global batch, in nats."),
        "train_bits_per_byte": RowField(
            "train/bits_per_byte",
            "The same loss in bits, over the bytes of text of the targets.",
        ),
        "lr": RowField("train/lr", "Learning rate of the step."),
        "grad_norm": RowField("train/grad_norm", "Norm of the gradient, before it is clipped."),
        "balance_loss": RowField(
            "train/balance_loss",
            "With experts: 1 where those of a layer get as many tokens each, else more.",
        ),
        "skipped": RowField(
            "train/skipped", "With `train.on_nan=skip`: steps without an update so far."
        ),
        "tokens_per_s": RowField(
            "speed/tokens_per_s", "Tokens a second in this step, of all ranks."
        ),
        "mean_tokens_per_s": RowField(
            "speed/mean_tokens_per_s", "The same over the last 20 steps together."
        ),
        "step_ms": RowField("speed/step_ms", "Milliseconds of the step."),
        "data_ms": RowField(
            "speed/data_ms", "Of them, those in which the first rank waited for its batch."
        ),
        "mfu": RowField(
            "speed/mfu", "Share of `train.peak_tflops` that the last 20 steps reached, 0 to 1."
        ),
        "memory_mib": RowField("memory/memory_mib", "MiB in use on the first rank after the step."),
        "peak_memory_mib": RowField(
            "memory/peak_memory_mib",
            "The most MiB that it ever had; on a CPU also while it read and encoded the text.",
        ),
        "bits_per_byte": RowField(
            "eval/bits_per_byte", "In a row of its own: bits per byte of the text held out."
        ),
        "eval_s": RowField("eval/eval_s", "Beside it: seconds of the evaluation."),
        "wall_s": RowField("ranks/wall_s", "With `--resilient`: Unix time of the row, in seconds."),
        "ranks": RowField("ranks/ranks", "With it: ranks that took part in the step."),
        "generation": RowField("ranks/generation", "With it: how often the ranks have changed."),
        "replicas": RowField("ranks/replicas", "With it: replicas that took part in the step."),
        "rows": RowField("ranks/rows", "With it: rows of text in the batch of the step."),
        "tp.N": RowField("ranks/tp.N", "With it: tensor-parallel ranks of replica N."),
    }
)
"""Every number that a row may have, by its name."""


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row is that of an evaluation, and not of a step of training."""
    return "loss" not in row


def tagged(row: Row) -> dict[str, float]:
    """The numbers of a row by their tags, without the step."""
    named = {name: FIELDS.get(_numbered(name)) for name in row if name != "step"}
    other = "eval" if is_evaluation(row) else "train"
    return {
        f"{other}/{name}" if field is None else field.tag.replace("tp.N", name): row[name]
        for name, field in named.items()
    }


def _numbered(name: str) -> str:
    return "tp.N" if name.startswith("tp.") else name


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """A sum of losses in nats as bits per byte of the text: comparable between tokenizers.

    NaN where the targets stand for no byte.
    """
    return nats / math.log(2) / num_bytes if num_bytes else math.nan


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
