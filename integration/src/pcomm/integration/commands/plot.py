"""`pcomm plot`: runs in one picture, with their last and best values and the keys that differ."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError

if TYPE_CHECKING:
    from pcomm.integration.metrics.picture import RunRows

__all__ = ["command"]

_FORMATS = (".png", ".svg", ".pdf")
_ABSENT = "-"


class PlotCommand:
    """Draws runs and compares them."""

    name = "plot"
    help = "Draw the loss, or another number, of one run or several; compare them in a table."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Folders of runs, `--out`, `--metric`, `--x`, `--smooth`."""
        parser.add_argument(
            "runs", type=Path, nargs="+", metavar="RUN", help="a folder that `pcomm train` wrote"
        )
        parser.add_argument(
            "--out",
            type=Path,
            default=Path("plot.png"),
            metavar="FILE",
            help="the picture, as .png, .svg or .pdf (default: plot.png)",
        )
        parser.add_argument(
            "--metric",
            metavar="NAME",
            help="a number of metrics.jsonl, such as grad_norm or speed/mfu (default: the loss of "
            "training and of the text held out, in bits per byte)",
        )
        parser.add_argument(
            "--x",
            choices=("steps", "tokens", "time"),
            default="steps",
            help="what goes to the right; time is that of steps and evaluations (default: steps)",
        )
        parser.add_argument(
            "--smooth",
            type=float,
            metavar="WEIGHT",
            help="smoothing as in TensorBoard, from 0 to below 1; the raw line stays, pale "
            "(default: a mean over about a 25th of the run)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Draw, then print the table."""
        from pcomm.integration.metrics.picture import RunRows, figure_of, save_figure, shown_names

        _check(arguments)
        runs = [RunRows(_folder(path)) for path in arguments.runs]
        figure = figure_of(runs, metric=arguments.metric, axis=arguments.x, weight=arguments.smooth)
        try:
            save_figure(figure, arguments.out)
        except OSError as error:
            raise ConfigError(
                f"pcomm plot --out {arguments.out}",
                found=error.strerror or str(error),
                why="The picture is written there.",
                fix="Name a file in a folder that exists and can be written.",
            ) from error
        print(_aligned(_values(runs, shown_names(runs, arguments.metric))))
        if len(runs) > 1:
            print()
            print(_aligned(_differences(runs)) or "All keys of the configurations are the same.")
        print(f"\n{arguments.out}  the picture")
        return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options before anything is read."""
    weight, out = arguments.smooth, arguments.out
    if weight is not None and not 0 <= weight < 1:
        raise ConfigError(
            f"pcomm plot --smooth {weight:g}",
            found="a number outside of 0 to below 1",
            why="It is the share that a moving mean keeps of what was before.",
            fix="Write 0 for no smoothing, or for example 0.9.",
        )
    if out.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"pcomm plot --out {out}",
            found=f"the suffix {out.suffix!r}",
            why="The name of the file says in which format the picture is written.",
            fix=f"End it with {' or '.join(_FORMATS)}.",
        )


def _folder(path: Path) -> Path:
    """The folder of a run, which may be named by its rows."""
    return path.parent if path.name == "metrics.jsonl" else path


def _values(runs: Sequence[RunRows], names: Sequence[str]) -> Iterator[Sequence[str]]:
    """A heading and a line for each run: last and best values of the numbers shown."""
    by_loss = names[0] in ("loss", "train_bits_per_byte")
    loss = ("training", "held out", "best held out", "at step", "tokens/s", "MiB")
    yield ("run", "steps", *(loss if by_loss else ("last", "lowest", "highest")))
    for run in runs:
        steps = run.curve("loss").steps
        begin = (str(run.folder), f"{steps[-1]:,}" if steps else _ABSENT)
        if by_loss:
            yield (*begin, *_losses(run, names[0]))
        else:
            values = run.curve(names[0]).values
            chosen = (values[-1], min(values), max(values)) if values else ()
            yield (*begin, *(map(_number, chosen) if chosen else (_ABSENT,) * 3))


def _losses(run: RunRows, name: str) -> Iterator[str]:
    from pcomm.integration.metrics.picture import smoothed

    training = smoothed(run.curve(name).values)
    held_out = run.curve("bits_per_byte")
    best = min(zip(held_out.values, held_out.steps, strict=True), default=(None, None))
    speed, memory = (run.curve(key).values for key in ("mean_tokens_per_s", "peak_memory_mib"))
    yield _number(training[-1] if training else None)
    yield _number(held_out.values[-1] if held_out.values else None)
    yield _number(best[0])
    yield _ABSENT if best[1] is None else f"{best[1]:,}"
    yield f"{speed[-1]:,.0f}" if speed else _ABSENT
    yield f"{max(memory):,.0f}" if memory else _ABSENT


def _differences(runs: Sequence[RunRows]) -> Iterator[Sequence[str]]:
    """A heading, and a line for each key whose values differ; nothing if none does."""
    configurations = [run.keys() for run in runs]
    names = dict.fromkeys(key for keys in configurations for key in keys)
    lines = [(name, *(keys.get(name, _ABSENT) for keys in configurations)) for name in names]
    if differing := [line for line in lines if len(set(line[1:])) > 1]:
        yield ("key", *(str(run.folder) for run in runs))
        yield from differing


def _number(value: float | None) -> str:
    if value is None:
        return _ABSENT
    return f"{value:.4g}" if not 1e-2 <= abs(value) < 1e4 else f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """Decimals that make four digits."""
    return max(0, 3 - math.floor(math.log10(abs(value))))


def _aligned(lines: Iterator[Sequence[str]]) -> str:
    """Columns two blanks apart; the first one to the left, numbers to the right."""
    table = list(lines)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


command = PlotCommand()
