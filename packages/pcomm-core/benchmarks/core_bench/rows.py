"""Rows of benchmarks: a measured value, where it was measured, and files of such."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _processor() -> str:
    """The name of the processor, as the system gives it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _commit() -> str:
    """The commit of the working folder, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """How the program was called, without the folders of this machine."""
    program = os.path.relpath(sys.argv[0])
    # What was installed is found by its name; where it lies is left out.
    is_installed = program.startswith(os.pardir)
    words = [os.path.basename(program)] if is_installed else ["python", program]
    return shlex.join([*words, *sys.argv[1:]])


def _version_of_torch() -> str:
    import torch

    return torch.__version__


@dataclass(frozen=True)
class Row:
    """A measured value and where it was measured: one line of a file in `docs/benchmarks`.

    `ratio` is the value over that of another case of the same run, `ratio_to`; it is None, and that
    empty, where there is nothing to compare with. `rounds` is the number of rounds behind them.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    ratio_to: str
    ratio: float | None
    rounds: int
    hardware: str = field(default_factory=_processor)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    python: str = field(default_factory=platform.python_version)
    torch: str = field(default_factory=_version_of_torch)
    commit: str = field(default_factory=_commit)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    command: str = field(default_factory=_command)


def row(
    benchmark: str,
    case: str,
    value: float,
    unit: str,
    rounds: int = 1,
    *,
    beside: tuple[str, float] | None = None,
) -> Row:
    """A row with a rounded value, and the ratio to another case that `beside` names."""
    ratio_to, ratio = ("", None) if beside is None else (beside[0], round(beside[1], 3))
    return Row(benchmark, case, round(value, 3), unit, ratio_to, ratio, rounds)


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Put `rows` into the CSV at `path`, in place of the rows of the same benchmarks."""
    names = [column.name for column in fields(Row)]
    kept: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            replaced = {row.benchmark for row in rows}
            kept = [row for row in csv.DictReader(file) if row["benchmark"] not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *map(asdict, rows)], key=lambda row: str(row["benchmark"])))


def save_places(path: Path, rows: Sequence[Row]) -> None:
    """`save_rows`, where rows of the same benchmark at other places, `CASE @ PLACE`, are kept."""
    measured = {(one.benchmark, one.case.partition(" @ ")[2]) for one in rows}
    names = {one.benchmark for one in rows}
    old = load_rows(path) if path.exists() else []
    kept = [one for one in old if one.benchmark in names]
    kept = [o for o in kept if (o.benchmark, o.case.partition(" @ ")[2]) not in measured]
    save_rows(path, [*kept, *rows])


def load_rows(path: Path) -> list[Row]:
    """The rows of a CSV that `save_rows` has written."""
    rows = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            columns: dict[str, Any] = dict(line)
            columns["value"] = float(line["value"])
            columns["ratio"] = float(line["ratio"]) if line["ratio"] else None
            columns |= {name: int(line[name]) for name in ("rounds", "cores")}
            rows.append(Row(**columns))
    return rows
