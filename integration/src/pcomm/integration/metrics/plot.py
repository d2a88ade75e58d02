"""The picture of a run: its loss, and its bits per byte on held-out text."""

from __future__ import annotations

import logging
from pathlib import Path

from pcomm.integration.atomic_file import atomic_write
from pcomm.integration.metrics.json_lines import read_rows

__all__ = ["draw_loss", "plot_loss"]

_log = logging.getLogger("pcomm.train")


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
