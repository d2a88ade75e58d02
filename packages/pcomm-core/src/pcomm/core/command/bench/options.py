"""What options of several benchmarks have in common. Needs no torch."""

from __future__ import annotations

from importlib.util import find_spec

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["check_can_plot", "numbers"]


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
