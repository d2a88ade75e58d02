"""The picture of a recorded run: loss and tokens/s over time, and the undisturbed loss."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recorded_run import KILLED, UNDISTURBED, Line, events_of, furthest_apart, shapes, steps_of

Curve = tuple[list[float], list[float]]
Mark = tuple[float, str]


def curve(lines: Sequence[Line], run: str, x: str, y: str) -> Curve:
    """A column of the steps of a run over another one."""
    steps = steps_of(lines, run)
    return [float(getattr(line, x)) for line in steps], [float(getattr(line, y)) for line in steps]


def marks(lines: Sequence[Line]) -> list[Mark]:
    """Times in seconds and texts of what is marked: the events, and the growth of the job."""
    found = [(line.seconds, line.event) for line in events_of(lines)]
    changes = shapes(lines)
    for before, after in itertools.pairwise(changes):
        if (after.ranks or 0) > (before.ranks or 0):
            found.append((after.seconds, f"{after.ranks} ranks again"))
    return sorted(found)


def draw(lines: Sequence[Line], image: Path) -> None:
    """Draw a recording as PNG. Needs no display."""
    figure = Figure(figsize=(8, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate, both = figure.subplots(3, 1)
    loss.plot(*curve(lines, KILLED, "seconds", "loss"), color="tab:blue", linewidth=1)
    rate.plot(*curve(lines, KILLED, "seconds", "tokens_per_s"), color="tab:orange", linewidth=1)
    for axes, label in ((loss, "loss, nats per token"), (rate, "tokens/s")):
        axes.set_xlabel("seconds")
        axes.set_ylabel(label)
        _mark(axes, marks(lines), has_text=axes is loss)
    rate.set_ylim(bottom=0)
    _degrees(rate, shapes(lines))
    both.plot(*curve(lines, UNDISTURBED, "step", "loss"), color="lightgrey", linewidth=5)
    both.plot(*curve(lines, KILLED, "step", "loss"), color="tab:blue", linewidth=1)
    both.legend(["undisturbed", "with ranks killed"])
    both.set_title(f"at most {furthest_apart(lines)[0]:.1e} nats apart", fontsize="medium")
    both.set_xlabel("step")
    both.set_ylabel("loss, nats per token")
    for axes in (loss, rate, both):
        axes.grid(alpha=0.3)
    figure.savefig(image, format="png")


def _mark(axes: Axes, found: Sequence[Mark], *, has_text: bool) -> None:
    for seconds, text in found:
        axes.axvline(seconds, color="tab:red", linewidth=1, linestyle="--")
        if has_text:
            axes.text(
                seconds,
                0.97,
                text,
                transform=axes.get_xaxis_transform(),
                rotation=90,
                verticalalignment="top",
                horizontalalignment="right",
                fontsize="small",
            )


def _degrees(axes: Axes, changes: Sequence[Line]) -> None:
    for line in changes:
        axes.text(
            line.seconds,
            0.03,
            f" tp {line.degrees}",
            transform=axes.get_xaxis_transform(),
            fontsize="small",
        )
