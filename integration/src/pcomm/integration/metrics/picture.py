"""Pictures of runs: each number as a smooth line over a pale one, in one unit."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.files import atomic_write
from pcomm.integration.metrics.progress import MovingMean
from pcomm.integration.metrics.rows import FIELDS, is_evaluation, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Axis", "Curve", "RunRows", "draw_loss", "figure_of", "save_figure", "smoothed"]

_log = logging.getLogger("pcomm.train")

Axis = Literal["steps", "tokens", "time"]

# Points of a line over which it is smoothed: so many parts has the picture.
_PARTS = 25
_MOST_WEIGHT = 0.99
# Inches and dots an inch: as wide as a phone is high, with letters that can be read at half of it.
_SIZE, _DPI, _LETTERS = (7.0, 4.5), 150, 13
_UNITS = {
    "train_bits_per_byte": "bits per byte",
    "bits_per_byte": "bits per byte",
    "loss": "nats per token",
    "mean_tokens_per_s": "tokens per second",
    "tokens_per_s": "tokens per second",
    "step_ms": "ms",
    "data_ms": "ms",
    "memory_mib": "MiB",
    "peak_memory_mib": "MiB",
    "eval_s": "s",
}


@dataclass(frozen=True)
class Curve:
    """Numbers of one name in the rows of a run, at ascending places; those not finite left out."""

    steps: list[int]
    """Step of each number."""

    places: list[float]
    """Where it stands on the axis."""

    values: list[float]
    """The numbers."""


class RunRows:
    """Rows and configuration of a run's folder.

    Args:
        folder: Folder that `pcomm train` wrote.

    Raises:
        ConfigError: It has no rows that can be read; see `read_rows`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = read_rows(folder / "metrics.jsonl")
        try:
            text = (folder / "config.toml").read_text(encoding="utf-8")
            self.config: Mapping[str, Any] = tomllib.loads(text)
        except (OSError, ValueError):
            # Only names and tokens need it.
            self.config = {}

    @property
    def name(self) -> str:
        """Name of the folder, as a title."""
        return self.folder.resolve().name

    def names(self) -> set[str]:
        """Names of all numbers in the rows, without the step."""
        return {name for row in self.rows for name in row if name != "step"}

    def curve(self, name: str, axis: Axis = "steps") -> Curve:
        """The numbers of one name.

        Raises:
            ConfigError: There is no place for them on that axis.
        """
        places = self._places(axis)
        found = [
            (int(row["step"] or 0), place, value)
            for row, place in zip(self.rows, places, strict=True)
            if (value := row.get(name)) is not None
        ]
        steps, at, values = ([one[i] for one in found] for i in range(3))
        return Curve([int(s) for s in steps], at, values)

    def keys(self) -> dict[str, str]:
        """The configuration as `section.key` to value, as JSON."""
        return {
            f"{section}.{key}": json.dumps(value)
            for section, content in self.config.items()
            if isinstance(content, Mapping)
            for key, value in content.items()
        }

    def _places(self, axis: Axis) -> list[float]:
        if axis == "time":
            spent = (
                (row.get("step_ms") or 0.0) / 1e3 + (row.get("eval_s") or 0.0) for row in self.rows
            )
            return list(accumulate(spent))
        factor = 1
        if axis == "tokens":
            factor = self.config.get("train", {}).get("global_batch_tokens", 0)
            if not factor:
                raise ConfigError(
                    f"pcomm plot {self.folder} --x tokens",
                    found="no train.global_batch_tokens in its config.toml",
                    why="A row has its step, and the configuration says how many tokens that is.",
                    fix="Put the run's config.toml back, or plot over steps.",
                )
        return [float(row["step"] or 0) * factor for row in self.rows]


def smoothed(values: Sequence[float], weight: float | None = None) -> list[float]:
    """Moving means of `values`; see `MovingMean`.

    Args:
        values: Numbers in their order.
        weight: What an older number keeps, in [0, 1); None for a mean over about a 25th of them.
    """
    if weight is None:
        weight = min(_MOST_WEIGHT, max(0.0, 1 - _PARTS / max(1, len(values))))
    mean = MovingMean(weight)
    return [mean.add(value) for value in values]


def draw_loss(run_dir: Path) -> None:
    """Draw `loss.png` of a run, or warn that it cannot be written: the run has ended well."""
    try:
        save_figure(figure_of([RunRows(run_dir)]), run_dir / "loss.png")
    except OSError as error:
        _log.warning("no picture of the loss: %s", error)


def figure_of(
    runs: Sequence[RunRows],
    *,
    metric: str | None = None,
    axis: Axis = "steps",
    weight: float | None = None,
) -> Figure:
    """A picture of one number of several runs; needs no display.

    Without a metric it shows the loss of training and what evaluations found, in one unit: bits per
    byte, and nats per token where a run has rows without the former, in which case evaluations are
    left out, as they have no such number.

    Args:
        runs: Rows of each run to draw, at least one run.
        metric: Name or tag of a number in `FIELDS`; None for the loss.
        axis: What goes to the right: steps, tokens, or seconds of steps and evaluations.
        weight: Weight of the mean before a value, from 0 to below 1, as for `smoothed`.

    Raises:
        ConfigError: No row has such a number, or there is no place for it on that axis.
    """
    # Imported here: it takes longer than all else in this package.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    names = shown_names(runs, metric)
    plot = figure.add_subplot()
    labels = _labels(runs)
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for name in names:
            curve = run.curve(name, axis)
            if not curve.values:
                continue
            is_held_out = name == "bits_per_byte"
            what = "held out" if is_held_out else "training"
            color = f"C{index if len(runs) > 1 else int(is_held_out)}"
            text = label if len(names) == 1 else what if len(runs) == 1 else f"{label}, {what}"
            if is_held_out:
                style: dict[str, Any] = {"marker": "o", "markersize": 5, "linestyle": "--"}
                plot.plot(curve.places, curve.values, color=color, label=text, **style)
                continue
            plot.plot(curve.places, curve.values, color=color, alpha=0.25, linewidth=1)
            line = smoothed(curve.values, weight)
            plot.plot(curve.places, line, color=color, linewidth=2.2, label=text)
    words = {"steps": "step", "tokens": "tokens", "time": "seconds of training"}
    plot.set_xlabel(words[axis], fontsize=_LETTERS)
    plot.set_ylabel(_UNITS.get(names[0], names[0]), fontsize=_LETTERS)
    title = labels[0] if len(runs) == 1 else metric or "loss"
    plot.set_title(title, fontsize=_LETTERS + 1)
    plot.tick_params(labelsize=_LETTERS - 1)
    plot.grid(alpha=0.3)
    if len(runs) > 1 or len(plot.get_legend_handles_labels()[1]) > 1:
        plot.legend(fontsize=_LETTERS - 1, frameon=False)
    return figure


def save_figure(figure: Figure, image: Path) -> None:
    """Write a picture, whole or not at all, in the format that its name ends with.

    Raises:
        OSError: It cannot be written.
    """
    with atomic_write(image) as file:
        figure.savefig(file, format=image.suffix.lstrip(".").lower() or "png")


def shown_names(runs: Sequence[RunRows], metric: str | None) -> list[str]:
    """Names of the numbers that a picture of `metric` shows.

    Raises:
        ConfigError: No row has such a number.
    """
    known = set().union(*(run.names() for run in runs))
    if metric is not None:
        by_tag = {field.tag: name for name, field in FIELDS.items()}
        name = by_tag.get(metric, metric)
        if name not in known:
            raise ConfigError(
                f"pcomm plot --metric {metric}",
                found="no row with such a number",
                why="A picture shows one number of the rows in metrics.jsonl.",
                fix=near_misses(metric, known),
            )
        return [name]
    trained = [row for run in runs for row in run.rows if not is_evaluation(row)]
    if all("train_bits_per_byte" in row for row in trained):
        return ["train_bits_per_byte", "bits_per_byte"]
    return ["loss"]


def _labels(runs: Sequence[RunRows]) -> list[str]:
    """Names of folders; whole paths where two are the same."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run.folder) for run in runs]
