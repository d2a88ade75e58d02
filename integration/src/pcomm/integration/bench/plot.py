"""Streams, contexts and goals as a picture of up to three panels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pcomm.core.testing.timing import Row
from pcomm.integration.bench.report import goals_of, rows_of
from pcomm.integration.bench.rows import Found, Goal

__all__ = ["plot_serving"]

_STREAMS = re.compile(r"(.+) @ .+, threads (?P<threads>\d+), streams (?P<x>\d+)")
_CONTEXT = re.compile(r"(.+) @ context (?P<x>\d+)")


def plot_serving(measured: Sequence[Found], image: Path) -> None:
    """Tokens/s by the streams and by the context, and how near each goal is; what is there.

    Args:
        measured: Results of the parts.
        image: File of the PNG; its folder is made if absent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = {found.part for found in measured}
    rows = [row for row in rows_of(measured) if row.unit == "tokens/s"]
    drawn: list[Callable[[Any], None]] = []
    if "streams" in parts:
        drawn.append(lambda panel: _lines(panel, rows, _STREAMS, "streams"))
    if "context" in parts:
        drawn.append(lambda panel: _lines(panel, rows, _CONTEXT, "tokens of context, one stream"))
    drawn.append(lambda panel: _goals(panel, goals_of(measured)))
    figure = Figure(figsize=(5.6 * len(drawn), 4.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for draw, panel in zip(drawn, panels, strict=True):
        draw(panel)
        panel.grid(alpha=0.3)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")


def _lines(panel: Any, rows: Sequence[Row], pattern: re.Pattern[str], label: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if match := pattern.fullmatch(row.case):
            found = match.groupdict()
            name = match[1] + (f", threads {found['threads']}" if "threads" in found else "")
            lines.setdefault(name, []).append((int(found["x"]), row.value))
    for name, points in lines.items():
        style = "-" if name.startswith("pcomm") else "--"
        panel.plot([x for x, _ in points], [y for _, y in points], style, marker="o", label=name)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yscale("log")
    panel.set_xlabel(label)
    panel.set_ylabel("tokens/s")
    panel.legend(frameon=False, fontsize=7)


def _goals(panel: Any, goals: Sequence[Goal]) -> None:
    shown = list(reversed(goals))
    # Above 1 is better than the goal, whichever way it is counted.
    nearness = [_nearness(goal) for goal in shown]
    colors = ["tab:green" if goal.is_met else "tab:red" for goal in shown]
    panel.barh(range(len(shown)), nearness, color=colors)
    panel.set_yticks(range(len(shown)), [goal.what for goal in shown], fontsize=6)
    panel.axvline(1.0, color="0.2", linewidth=1)
    panel.set_xlabel("reached, as a factor of the goal (more is better)")


def _nearness(goal: Goal) -> float:
    """How many times as good as the goal, at most 5, so that bars of others can be read."""
    if not goal.is_most:
        return min(goal.reached / goal.limit, 5.0)
    return min(goal.limit / max(goal.reached, 1e-9), 5.0)
