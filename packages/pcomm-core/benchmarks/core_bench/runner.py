"""The one runner of benchmarks: options, turns, and what becomes of the rows.

A benchmark is a dataclass of settings, a function that measures with them, and a `Benchmark` around
both, which is the `command` that `pcomm bench` finds. torch and matplotlib are imported when
something is measured or drawn, so that options can be listed without them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from core_bench.pictures import Picture, draw
from core_bench.rows import Row, load_rows, row, save_rows
from core_bench.tables import differences, lines_of, tables
from pcomm.core.errors import ConfigError, UnsupportedError, near_misses

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives


T = TypeVar("T")

NOT_HERE = 77
"""Exit code of a benchmark that this machine cannot run; automake's for a skipped test."""

_QUICK = "small sizes and few rounds; the figures mean little"


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
    """What was measured: rows, and the same for a reader.

    `text` is empty where `measure` has printed as it went; `code` is that of the program.
    """

    rows: Sequence[Row]
    text: str
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
        pictures: What `--plot` draws from the rows.
    """

    name: str
    help: str
    settings: Any
    measure: Callable[[Any], Results | None]
    quick: Any = None
    pictures: Sequence[Picture] = ()

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
        add = parser.add_argument
        if self.quick is not None:
            add("--quick", action="store_true", help=f"see it work: {_QUICK}")
        add("--csv", type=Path, metavar="FILE", help="write the rows there, in place of older ones")
        add("--plot", type=Path, metavar="DIR", help="draw the pictures of the rows there, as PNGs")
        help = "show how the rows differ from those of an earlier --csv"
        add("--compare", type=Path, metavar="FILE", help=help)
        help = "measure nothing: take the rows of an earlier --csv"
        add("--from", type=Path, metavar="FILE", dest="source", help=help)

    def settings_of(self, arguments: argparse.Namespace) -> Any:
        """The settings that the options ask for; what they refuse is a `ConfigError`."""
        base = self.quick if getattr(arguments, "quick", False) else self.settings
        given = {one: getattr(arguments, one.name) for one in self._options()}
        changes = {one.name: self._value(one, x) for one, x in given.items() if x is not None}
        return replace(base, **changes)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = self.settings_of(arguments)
        if arguments.plot is not None:
            check_can_plot(self.name, self.pictures)
        earlier = None if arguments.compare is None else self._read(arguments.compare, "--compare")
        if arguments.source is not None:
            rows = self._read(arguments.source, "--from")
            found: Results | None = Results(rows, "\n".join(tables(rows)))
        else:
            found = self.measure(settings)
        if found is None:
            return 0
        if found.text:
            print(found.text)
        if arguments.csv is not None and found.rows:
            save_rows(arguments.csv, found.rows)
            print(f"rows: {arguments.csv}")
        if earlier is not None:
            print("\n".join(differences(found.rows, earlier)))
        note = _QUICK if getattr(arguments, "quick", False) else ""
        for one in self.pictures if arguments.plot is not None else ():
            path = draw(one, found.rows, arguments.plot, note)
            print(f"picture: {path or f'none of {one.name}, for want of rows'}")
        return found.code

    def _read(self, path: Path, option: str) -> list[Row]:
        """The rows of this benchmark in a CSV; anything else is a `ConfigError`."""
        try:
            rows = [row for row in load_rows(path) if row.benchmark.split()[0] == self.name]
            problem = "" if rows else "no rows of this benchmark"
        except (OSError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise ConfigError(
                f"pcomm bench {self.name} {option} {path}",
                found=problem,
                why="The option takes rows that the same benchmark has written.",
                fix=f"Write some: `pcomm bench {self.name} --csv {path}`.",
            )
        return rows

    def _options(self) -> list[Any]:
        return [one for one in fields(self.settings) if "option" in one.metadata]

    def _value(self, one: Any, given: Any) -> object:
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


def check_can_plot(benchmark: str, pictures: Sequence[Picture]) -> None:
    """Refuse `--plot` without matplotlib or pictures, before minutes of measuring."""
    if not pictures:
        raise ConfigError(
            f"pcomm bench {benchmark} --plot",
            found="a benchmark without pictures",
            why="Its rows answer no question that a picture would show better.",
            fix="Leave --plot out.",
        )
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
    print("\n".join(lines_of(rows)))
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
