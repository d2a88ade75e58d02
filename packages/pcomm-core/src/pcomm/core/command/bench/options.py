"""Options that several benchmarks have, and the checks of their values. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses

__all__ = [
    "add_numbers",
    "add_outputs",
    "check_can_plot",
    "check_counts",
    "check_parts",
    "check_rounds",
    "given_numbers",
    "numbers",
]


def add_numbers(
    parser: argparse.ArgumentParser,
    option: str,
    words: str,
    default: Sequence[int],
    *,
    metavar: str = "N,N",
) -> None:
    """Declare an option such as `--streams 1,8`, which `given_numbers` reads.

    Args:
        parser: Parser of the benchmark.
        option: Name of the option with its dashes.
        words: Subject of the numbers, for the help.
        default: Numbers without the option, for the help.
        metavar: Form of the value, for the help.
    """
    shown = ",".join(map(str, default))
    parser.add_argument(option, metavar=metavar, help=f"{words} ({shown})")


def add_outputs(
    parser: argparse.ArgumentParser, *, rows: str = "this benchmark", picture: str
) -> None:
    """Declare `--csv` and `--plot`, which `write_results` carries out.

    Args:
        parser: Parser of the benchmark.
        rows: Source of the rows that are replaced in the CSV, for the help.
        picture: Subject of the picture, for the help.
    """
    add = parser.add_argument
    add("--csv", type=Path, metavar="FILE", help=f"replace the rows of {rows} there")
    add("--plot", type=Path, metavar="FILE", help=f"draw {picture} as a PNG")


def check_can_plot(benchmark: str) -> None:
    """Find out before minutes of measuring.

    Args:
        benchmark: Its name, for the error.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"pcomm bench {benchmark} --plot",
            found="matplotlib is not installed",
            why="It draws the picture; nothing else here needs it.",
            fix="Run `python3 -m pip install matplotlib`, or leave --plot out.",
        )


def numbers(benchmark: str, option: str, text: str) -> tuple[int, ...]:
    """The numbers of an option such as `2,4`.

    Args:
        benchmark: Its name, for the error.
        option: Name of the option with its dashes, `--ranks`.
        text: Value from the command line.

    Raises:
        ConfigError: Something else.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"pcomm bench {benchmark} {option} {text}",
            found="words that are no numbers",
            why="The option takes numbers with commas between them.",
            fix=f"Write it like {option} 2,4.",
        ) from None


def given_numbers(
    benchmark: str, arguments: argparse.Namespace, options: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The numbers of those options that were given, by name.

    Args:
        benchmark: Its name, for errors.
        arguments: Parsed options.
        options: Names of options of `add_numbers`, without dashes.

    Raises:
        ConfigError: A value is something else than numbers.
    """
    given = {option: getattr(arguments, option) for option in options}
    return {
        option: numbers(benchmark, f"--{option}", text)
        for option, text in given.items()
        if text is not None
    }


def check_counts(benchmark: str, counts: Mapping[str, Sequence[int]]) -> None:
    """Refuse numbers below 1, and none at all.

    Args:
        benchmark: Its name, for the error.
        counts: Numbers by the name of their option with its dashes.

    Raises:
        ConfigError: There are such numbers.
    """
    for option, values in counts.items():
        if not values or min(values) < 1:
            raise ConfigError(
                f"pcomm bench {benchmark} {option} {','.join(map(str, values))}",
                found="a number below 1, or none",
                why="There must be something to measure.",
                fix="Use numbers from 1 on with commas between them.",
            )


def check_parts(benchmark: str, parts: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that are no part of a benchmark, or that occur twice, and none at all.

    Args:
        benchmark: Its name, for the error.
        parts: Names that were asked for.
        known: Names of all parts.

    Raises:
        ConfigError: There are such names, or no name.
    """
    unknown = [part for part in parts if part not in known]
    if unknown or len(set(parts)) != len(parts) or not parts:
        raise ConfigError(
            f"pcomm bench {benchmark} --parts {','.join(parts)}",
            found=f"no part {unknown[0]!r}" if unknown else "a part twice, or none",
            why=f"The parts are {', '.join(known)}.",
            fix=near_misses(unknown[0], known) if unknown else "Name each part once.",
        )


def check_rounds(benchmark: str, rounds: int, *, fewest: int, better: int) -> None:
    """Refuse a number of rounds whose median means nothing.

    Args:
        benchmark: Its name, for the error.
        rounds: Number of rounds.
        fewest: Smallest number that is taken.
        better: Number that the error recommends.

    Raises:
        ConfigError: There are fewer.
    """
    if rounds < fewest:
        raise ConfigError(
            f"pcomm bench {benchmark} --rounds {rounds}",
            found=f"fewer than {fewest} rounds",
            why="The median of so few rounds is a matter of luck on a shared machine.",
            fix=f"Use at least {fewest}, better {better}.",
        )
