"""The one runner of benchmarks: options, turns, rows of a CSV, tables and pictures.

A benchmark is a dataclass of settings, a function that measures with them, and a `Benchmark` around
both, which is the `command` that `pcomm bench` finds. torch and matplotlib are imported when
something is measured or drawn, so that options can be listed without them.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives


T = TypeVar("T")

NOT_HERE = 77
"""Exit code of a benchmark that this machine cannot run; automake's for a skipped test."""


# -- a benchmark as a command ----------------------------------------------------------------


def option(
    default: T, words: str, *, metavar: str = "", parse: Callable[[str], object] | None = None
) -> T:
    """The default of a field of settings that is an option of the benchmark, `--name-of-field`.

    Numbers and names are given with commas where it is a tuple of such; the option of a field that
    is true or false takes the other of both; any other one needs `parse`, from text to value.
    """
    return cast(T, field(default=cast(Any, default), metadata={"option": (words, metavar, parse)}))


@dataclass(frozen=True)
class Results:
    """What was measured: rows, the same for a reader, and what draws a picture to a path.

    `text` is empty where `measure` has printed as it went; `code` is that of the program.
    """

    rows: Sequence[Row]
    text: str
    draw: Callable[[Path], None] | None = None
    code: int = 0


@dataclass(frozen=True)
class Benchmark:
    """A `pcomm.core.cli.Command` whose options are the fields of its settings, made by `option`.

    Args:
        name: Word that the user types.
        help: One line that says what the benchmark measures.
        settings: Settings without options, an instance of a dataclass, which checks itself.
        measure: From settings to results; None on ranks that only take part. It imports torch.
        quick: Settings of `--quick`; None for a benchmark without.
        rows: Source of the rows that are replaced in the CSV, for the help.
        picture: Subject of the picture, for the help; empty for none.
    """

    name: str
    help: str
    settings: Any
    measure: Callable[[Any], Results | None]
    quick: Any = None
    rows: str = "this benchmark"
    picture: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        for one in self._options():
            (words, metavar, parse), default = one.metadata["option"], one.default
            if isinstance(default, bool):
                parser.add_argument(_flag(one), action="store_const", const=not default, help=words)
            elif isinstance(default, int):
                shown = f"{words} ({default})"
                parser.add_argument(_flag(one), type=int, metavar=metavar or "N", help=shown)
            else:
                shown = words if parse else f"{words} ({','.join(map(str, default))})"
                parser.add_argument(_flag(one), metavar=metavar or "N,N", help=shown)
        if self.quick is not None:
            parser.add_argument("--quick", action="store_true", help="in seconds, for no figures")
        add = parser.add_argument
        add("--csv", type=Path, metavar="FILE", help=f"replace the rows of {self.rows} there")
        if self.picture:
            add("--plot", type=Path, metavar="FILE", help=f"draw {self.picture} as a PNG")

    def settings_of(self, arguments: argparse.Namespace) -> Any:
        """The settings that the options ask for; what they refuse is a `ConfigError`."""
        base = self.quick if getattr(arguments, "quick", False) else self.settings
        given = {one: getattr(arguments, one.name) for one in self._options()}
        changes = {one.name: self._read(one, x) for one, x in given.items() if x is not None}
        return replace(base, **changes)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = self.settings_of(arguments)
        if self.picture and arguments.plot is not None:
            check_can_plot(self.name)
        found = self.measure(settings)
        if found is None:
            return 0
        if found.text:
            print(found.text)
        if arguments.csv is not None and found.rows:
            save_rows(arguments.csv, found.rows)
            print(f"rows: {arguments.csv}")
        if found.draw is not None and getattr(arguments, "plot", None) is not None:
            found.draw(arguments.plot)
            print(f"picture: {arguments.plot}")
        return found.code

    def _options(self) -> list[Any]:
        return [one for one in fields(self.settings) if "option" in one.metadata]

    def _read(self, one: Any, given: Any) -> object:
        _, _, parse = one.metadata["option"]
        if parse is not None or not isinstance(given, str):
            return parse(given) if parse is not None else given
        if all(isinstance(known, int) for known in one.default):
            return numbers(self.name, _flag(one), given)
        return tuple(given.split(","))


def _flag(one: Any) -> str:
    return f"--{one.name.replace('_', '-')}"


def numbers(benchmark: str, option: str, text: str) -> tuple[int, ...]:
    """The numbers of an option such as `--ranks 2,4`; anything else is a `ConfigError`."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"pcomm bench {benchmark} {option} {text}",
            found="words that are no numbers",
            why="The option takes numbers with commas between them.",
            fix=f"Write it like {option} 2,4.",
        ) from None


def check_counts(benchmark: str, counts: Mapping[str, Sequence[int]]) -> None:
    """Refuse numbers below 1, and none at all, by the name of their option with its dashes."""
    for option, values in counts.items():
        if not values or min(values) < 1:
            raise ConfigError(
                f"pcomm bench {benchmark} {option} {','.join(map(str, values))}",
                found="a number below 1, or none",
                why="There must be something to measure.",
                fix="Use numbers from 1 on with commas between them.",
            )


def check_parts(benchmark: str, parts: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that are no part of a benchmark, or that occur twice, and none at all."""
    unknown = [part for part in parts if part not in known]
    if unknown or len(set(parts)) != len(parts) or not parts:
        raise ConfigError(
            f"pcomm bench {benchmark} --parts {','.join(parts)}",
            found=f"no part {unknown[0]!r}" if unknown else "a part twice, or none",
            why=f"The parts are {', '.join(known)}.",
            fix=near_misses(unknown[0], known) if unknown else "Name each part once.",
        )


def check_rounds(benchmark: str, rounds: int, *, fewest: int, better: int) -> None:
    """Refuse a number of rounds whose median means nothing, and recommend a better one."""
    if rounds < fewest:
        raise ConfigError(
            f"pcomm bench {benchmark} --rounds {rounds}",
            found=f"fewer than {fewest} rounds",
            why="The median of so few rounds is a matter of luck on a shared machine.",
            fix=f"Use at least {fewest}, better {better}.",
        )


def check_can_plot(benchmark: str) -> None:
    """Refuse `--plot` without matplotlib, before minutes of measuring."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"pcomm bench {benchmark} --plot",
            found="matplotlib is not installed",
            why="It draws the picture; nothing else here needs it.",
            fix="Run `python3 -m pip install matplotlib`, or leave --plot out.",
        )


def run_benchmark(description: str | None, measure: Callable[[], Sequence[Row]]) -> None:
    """What a script does, whose docstring is given: measure, print, and save where `--csv` says.

    A `measure` that raises an `UnsupportedError`, for want of a GPU for instance, ends the program
    with the code `NOT_HERE`.
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
    print("\n".join(lines_of(rows, width=58)))
    if arguments.csv is not None:
        save_rows(arguments.csv, rows)


# -- times -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call of a case, as the mean over the calls of each round in turn."""

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


def take_turns(
    turns: Mapping[str, Callable[[], float | Mapping[str, float]]],
    rounds: int,
    *,
    warm_up: bool = True,
    fewer: Mapping[str, int] | None = None,
) -> dict[str, Timing]:
    """In each round every case once, so that what is compared happened in the same round.

    Args:
        turns: Functions that do one turn of a case and return its microseconds, or those of
            several parts by name; between ranks they take `seconds_together`.
        rounds: Number of rounds that count.
        warm_up: True for one round before them.
        fewer: Smaller numbers of rounds of slow cases, which have none before.
    """
    most = dict.fromkeys(turns, rounds) | dict(fewer or {})
    found: dict[str, list[float]] = {}
    for index in range(-1 if warm_up else 0, rounds):
        for name, turn in turns.items():
            if index >= most[name] or (index < 0 and most[name] < rounds):
                continue
            taken_us = turn()
            parts = taken_us if isinstance(taken_us, Mapping) else {name: taken_us}
            for part, value in parts.items() if index >= 0 else ():
                found.setdefault(part, []).append(value)
    return {name: Timing(name, tuple(times)) for name, times in found.items()}


def seconds_together(run: Callable[[], object], collectives: Collectives) -> float:
    """Seconds that `run` takes on the slowest rank, from when all are there. Collective."""
    import torch

    collectives.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(collectives.all_reduce(taken, op="max"))


def time_cases(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 101,
    round_s: float = 0.002,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Call every case again and again, in turns, and say how long a call took in each round.

    A turn is as many calls as take `round_s` seconds of `clock`, at least one. The clock
    `time.thread_time` leaves out what other programs take from this thread, and is right for work
    of the host that neither waits nor uses other threads. What cases compute is checked before.

    Raises:
        ConfigError: Fewer than 7 rounds, too few for a median.
    """
    if rounds < 7:
        raise ConfigError(
            f"time_cases: rounds={rounds}",
            found="fewer than 7",
            why="The median of so few rounds is a matter of luck on a shared machine.",
            fix="Use at least 7, better 101 short ones.",
        )

    def turn(run: Callable[[], object]) -> Callable[[], float]:
        run()
        calls = max(1, int(round_s / _seconds(run, 3, clock)))
        return lambda: _seconds(run, calls, clock) * 1e6

    turns = {name: turn(run) for name, run in cases.items()}
    return take_turns(turns, rounds, warm_up=False)


def _seconds(run: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    """Seconds that one of `calls` calls takes."""
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


# -- rows ------------------------------------------------------------------------------------


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


def compare(benchmark: str, ours: Timing, bare: Timing) -> list[Row]:
    """The bare call, ours as a ratio to it, and how much longer ours takes in two readings."""
    rounds, faster = len(ours.rounds_us), ours.fastest_us - bare.fastest_us
    ratio = bare.case, ours.ratio_to(bare)
    return [
        row(benchmark, bare.case, bare.median_us, "us", rounds),
        row(benchmark, ours.case, ours.median_us, "us", rounds, beside=ratio),
        row(benchmark, f"{ours.case}: more in the same round", ours.more_than(bare), "us", rounds),
        row(benchmark, f"{ours.case}: more in the fastest round", faster, "us", rounds),
    ]


def beside_first(benchmark: str, timings: Mapping[str, Timing]) -> list[Row]:
    """A row for each case; the first is what the others are compared with."""
    bare, *others = timings.values()
    rows = [row(benchmark, bare.case, bare.median_us, "us", len(bare.rounds_us))]
    return [*rows, *(compare(benchmark, one, bare)[1] for one in others)]


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


# -- for a reader ----------------------------------------------------------------------------


def lines_of(rows: Sequence[Row], *, width: int = 72) -> Iterator[str]:
    """A line for each row."""
    for one in rows:
        ratio = "" if one.ratio is None else f"  {one.ratio:.3f} x {one.ratio_to}"
        yield f"{one.case:<{width}} {one.value:>9.3f} {one.unit}{ratio}"


def table(lines: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Columns as wide as their cells: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield indent + "  ".join(cells).rstrip()


def grid(rows: Sequence[Row], *, indent: str = "  ", turned: bool = False) -> Iterator[str]:
    """A table of rows of one unit, whose names are `case @ place`: a column for each place.

    With `turned` there is a line for each place, where there are many of them.
    """
    values = {tuple(one.case.split(" @ ")): f"{one.value:.4g}" for one in rows}
    cases = dict.fromkeys(case for case, _ in values)
    places = dict.fromkeys(place for _, place in values)
    lines = [[case, *(values.get((case, place), "-") for place in places)] for case in cases]
    lines = [["", *places], *lines]
    return table([[*one] for one in zip(*lines, strict=True)] if turned else lines, indent=indent)


def tables(rows: Sequence[Row], *, turned: bool = False) -> Iterator[str]:
    """For each unit a grid of the rows that have a place, and a line for each other one."""
    for unit in dict.fromkeys(one.unit for one in rows):
        these = [one for one in rows if one.unit == unit]
        placed = [one for one in these if " @ " in one.case]
        yield from ("", f"{unit}:")
        yield from grid(placed, turned=turned) if placed else ()
        yield from lines_of([one for one in these if one not in placed])


@contextmanager
def picture(
    image: Path,
    *,
    columns: int,
    rows: int = 1,
    size: tuple[float, float] = (5.2, 4.4),
    sharey: bool = False,
) -> Iterator[Any]:
    """A block that draws on `panels[row][column]`, each of `size` inches, for the PNG `image`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((columns * size[0], rows * size[1]), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")


def draw_lines(
    panel: Any,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Points by the name of their line, both axes logarithmic; styles are those of matplotlib."""
    for name, points in lines.items():
        style = {"marker": "o", "markersize": 4, **(styles or {}).get(name, {})}
        panel.plot([a for a, _ in points], [b for _, b in points], label=name, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=7)
