"""Timing alternatives in one run, and keeping the result as rows of a committed CSV.

Only ratios and differences of one run are worth keeping on a machine that others use too. So the
cases take turns, in many short rounds, and what is compared is what happened in the same round.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path

import torch

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["NOT_HERE", "Row", "Timing", "compare", "run_benchmark", "save_rows", "time_cases"]

NOT_HERE = 77
"""Exit code of a benchmark that this machine cannot run; automake's for a skipped test."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call of a case, once for each round.

    Args:
        case: Name of the call.
        rounds_us: Mean over the calls of a round, in the order of the rounds.
    """

    case: str
    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Microseconds a call in the median round."""
        return statistics.median(self.rounds_us)

    @property
    def fastest_us(self) -> float:
        """Microseconds a call in the round that was disturbed least."""
        return min(self.rounds_us)

    def ratio_to(self, other: Timing) -> float:
        """How many times as long as `other`: the median of the ratios within a round."""
        pairs = zip(self.rounds_us, other.rounds_us, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def more_than(self, other: Timing) -> float:
        """Microseconds a call more than `other`: the median of the differences within a round."""
        pairs = zip(self.rounds_us, other.rounds_us, strict=True)
        return statistics.median(mine - theirs for mine, theirs in pairs)


@cache
def _processor() -> str:
    """The name of the processor, as the system gives it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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


@dataclass(frozen=True)
class Row:
    """A measured value and where it was measured: one line of a file in `docs/benchmarks`.

    Args:
        benchmark: Name of the script.
        case: Name of the measured case.
        value: The number.
        unit: Unit of the number, such as `us`.
        ratio_to: Another case of the same run; empty if there is nothing to compare with.
        ratio: This value over that case's.
        rounds: Number of rounds behind the value.
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
    torch: str = field(default_factory=lambda: torch.__version__)
    commit: str = field(default_factory=_commit)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    command: str = field(default_factory=_command)


def time_cases(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 101,
    round_s: float = 0.002,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Call every case again and again, in turns, and say how long a call took in each round.

    Args:
        cases: Functions of no arguments by name; what they compute must have been checked before.
        rounds: Number of turns of each case, at least 7.
        round_s: About how long a turn lasts, in seconds; at least one call.
        clock: Seconds. `time.thread_time` leaves out what other programs take from this thread,
            and is right for work of the host that neither waits nor uses other threads.

    Raises:
        ConfigError: Too few rounds for a median.
    """
    if rounds < 7:
        raise ConfigError(
            f"time_cases: rounds={rounds}",
            found="fewer than 7",
            why="The median of so few rounds is a matter of luck on a shared machine.",
            fix="Use at least 7, better 101 short ones.",
        )
    calls = {}
    for name, run in cases.items():
        run()
        calls[name] = max(1, int(round_s / _seconds(run, 3, clock)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            times[name].append(_seconds(run, calls[name], clock) * 1e6)
    return {name: Timing(name, tuple(found)) for name, found in times.items()}


def compare(benchmark: str, ours: Timing, bare: Timing) -> list[Row]:
    """The bare call, ours as a ratio to it, and how much longer ours takes in two readings."""
    ratio, rounds = round(ours.ratio_to(bare), 3), len(ours.rounds_us)

    def row(case: str, value: float, ratio_to: str = "", ratio: float | None = None) -> Row:
        return Row(benchmark, case, round(value, 3), "us", ratio_to, ratio, rounds)

    return [
        row(bare.case, bare.median_us),
        row(ours.case, ours.median_us, bare.case, ratio),
        row(f"{ours.case}: more in the same round", ours.more_than(bare)),
        row(f"{ours.case}: more in the fastest round", ours.fastest_us - bare.fastest_us),
    ]


def run_benchmark(description: str | None, measure: Callable[[], Sequence[Row]]) -> None:
    """What a benchmark script does: measure, print, and save where `--csv` says.

    A `measure` that raises an `UnsupportedError`, for want of a GPU for instance, ends the program
    with the code `NOT_HERE`.

    Args:
        description: The script's docstring, shown by `--help`.
        measure: Checks that the alternatives agree, then times them.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, help="file whose rows of this benchmark are replaced")
    arguments = parser.parse_args()
    try:
        rows = measure()
    except UnsupportedError as error:
        print(f"UnsupportedError: {error}", file=sys.stderr)
        sys.exit(NOT_HERE)
    for row in rows:
        ratio = "" if row.ratio is None else f"  {row.ratio:.3f} x {row.ratio_to}"
        print(f"{row.case:<58} {row.value:>9.3f} {row.unit}{ratio}")
    if arguments.csv is not None:
        save_rows(arguments.csv, rows)


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


def _seconds(run: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    """Seconds that one of `calls` calls takes."""
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls
