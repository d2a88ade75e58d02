"""Pictures of benchmarks: each asks one question of the rows, and its title is their answer.

A picture is as narrow as a phone and drawn from rows alone, so those of an earlier run can be drawn
again. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Bars", "Lines", "Measured", "Picture", "draw"]

# Inches, dots an inch and points: letters of 10 pixels where the picture is 360 pixels wide.
WIDTH, DPI, LETTERS = 4.8, 200, 10
_LETTERS_A_LINE = 52
_OURS, _THEIRS = "#2f6db5", "#9aa3af"
_COLORS = (_OURS, "#3b8a46", "#b8701c", "#8b4a9e")
_GREYS = (("0.25", "s"), ("0.55", "^"), ("0.7", "D"))


class Measured(Protocol):
    """What a picture needs of a row."""

    @property
    def case(self) -> str:
        """Name of what was measured, and behind ` @ ` where."""

    @property
    def value(self) -> float:
        """The number."""

    @property
    def unit(self) -> str:
        """Its unit."""


class Picture(Protocol):
    """One question to the rows of a benchmark."""

    @property
    def name(self) -> str:
        """Name of the file, without its ending."""

    def figure(self, rows: Sequence[Measured]) -> Any:
        """A figure of matplotlib, or None where the rows say too little."""


@dataclass(frozen=True)
class Bars:
    """A bar for each of a few cases at one place.

    Args:
        name: Name of the file.
        question: Title where a case of the answer is missing.
        answer: From values by label to the title.
        unit: Unit of the rows.
        axis: Words for it.
        bars: Labels by case, such as `{"pcomm, 2 groups": "pcomm"}`, from top to bottom; ours
            begin with `pcomm`.
        place: What is behind ` @ `; where the rows lack it, another one that they have. Empty for
            cases that have none.
    """

    name: str
    question: str
    answer: Callable[[Mapping[str, float]], str]
    unit: str
    axis: str
    bars: Mapping[str, str]
    place: str = ""

    def figure(self, rows: Sequence[Measured]) -> Any:
        """A figure of matplotlib, or None with fewer than two bars."""
        found = {one.case: one.value for one in rows if one.unit == self.unit}
        place = self._place(found)
        cases = {case: f"{case} @ {place}" if place else case for case in self.bars}
        values = {self.bars[short]: found[case] for short, case in cases.items() if case in found}
        if len(values) < 2:
            return None
        figure, panel = _panel(0.9 + 0.42 * len(values))
        colors = [_OURS if label.startswith("pcomm") else _THEIRS for label in values]
        drawn = panel.barh(range(len(values)), list(values.values()), color=colors, height=0.7)
        panel.bar_label(drawn, labels=[_short(value) for value in values.values()], padding=3)
        panel.set_yticks(range(len(values)), list(values))
        panel.invert_yaxis()
        panel.margins(x=0.18)
        between = ", " if len(self.axis + place) < _LETTERS_A_LINE else "\n"
        words = f"{self.axis}{between}{place}" if place else self.axis
        figure.supxlabel(words, fontsize=LETTERS)
        return _titled(figure, self.question, self.answer, values)

    def _place(self, found: Mapping[str, float]) -> str:
        wanted = next(iter(self.bars))
        places = [case.partition(" @ ")[2] for case in found if case.startswith(f"{wanted} @ ")]
        return self.place if self.place in places or not places else places[-1]


@dataclass(frozen=True)
class Lines:
    """A line for each of a few cases over a number that their places have.

    Args:
        name: Name of the file.
        question: Title where a point of the answer is missing.
        answer: From values by label and number to the title.
        unit: Unit of the rows.
        x: Words for the number.
        y: Words for the unit.
        pattern: Expression that cases match as a whole, with groups `line` and `x`; `PLACE` in it
            is the first of `places` that the rows have.
        lines: Labels by what `line` matches; ours begin with `pcomm`, others are dashed.
        is_log: Whether values have a logarithmic axis.
    """

    name: str
    question: str
    answer: Callable[[Mapping[tuple[str, int], float]], str]
    unit: str
    x: str
    y: str
    pattern: str
    lines: Mapping[str, str]
    places: tuple[str, ...] = ("",)
    is_log: bool = False

    def figure(self, rows: Sequence[Measured]) -> Any:
        """A figure of matplotlib, or None where no line has two points."""
        values = next(filter(None, (self._values(rows, place) for place in self.places)), {})
        labels = [label for label in self.lines.values() if any(label == key[0] for key in values)]
        numbers = sorted({x for _, x in values})
        if len(numbers) < 2:
            return None
        figure, panel = _panel(3.4 + 0.2 * ((len(labels) + 1) // 2))
        ours, theirs = iter(_COLORS), iter(_GREYS)
        for label in labels:
            points = sorted((x, y) for (name, x), y in values.items() if name == label)
            if label.startswith("pcomm"):
                style = {"color": next(ours), "marker": "o"}
            else:
                color, marker = next(theirs)
                style = {"color": color, "marker": marker, "linestyle": "--"}
            panel.plot(*zip(*points, strict=True), markersize=5, label=label, **style)
        _label_axes(panel, numbers, values.values(), self.is_log)
        panel.set_xlabel(self.x)
        panel.set_ylabel(self.y)
        if len(labels) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return _titled(figure, self.question, self.answer, values)

    def _values(self, rows: Sequence[Measured], place: str) -> dict[tuple[str, int], float]:
        pattern = self.pattern.replace("PLACE", re.escape(place))
        found = {}
        for one in rows:
            match = re.fullmatch(pattern, one.case)
            if one.unit == self.unit and match and match["line"] in self.lines:
                found[self.lines[match["line"]], int(match["x"])] = one.value
        return found


def draw(picture: Picture, rows: Sequence[Measured], folder: Path, note: str = "") -> Path | None:
    """Draw a picture into a folder, which is made; its file, or None where rows say too little.

    Args:
        picture: The picture.
        rows: Rows of its benchmark.
        folder: Folder of the file, whose name is that of the picture.
        note: Words in brackets below the title; empty for none.
    """
    from matplotlib import rc_context

    with rc_context({"font.size": LETTERS, "axes.spines.top": False, "axes.spines.right": False}):
        figure = picture.figure(rows)
        if figure is None:
            return None
        if note:
            _title(figure, f"{figure.get_suptitle()}\n({note})")
        path = folder / f"{picture.name}.png"
        folder.mkdir(parents=True, exist_ok=True)
        # The answer goes with the file, where a program can read it.
        figure.savefig(path, metadata={"Title": figure.get_suptitle(), "Software": None})
    return path


def _panel(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _titled(figure: Any, question: str, answer: Callable[[Any], str], values: Any) -> Any:
    try:
        title = answer(values)
    except KeyError:
        title = question
    _title(figure, textwrap.fill(title, _LETTERS_A_LINE))
    return figure


def _title(figure: Any, title: str) -> None:
    figure.suptitle(title, fontsize=LETTERS + 1, fontweight="bold")


def _label_axes(panel: Any, numbers: Sequence[int], values: Any, is_log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [f"{x:,}" for x in numbers])
    panel.xaxis.set_minor_locator(NullLocator())
    if is_log:
        panel.set_yscale("log")
        # A tick that is alone says nothing, so few powers of ten have steps between them.
        steps = (1.0,) if max(values) > 100 * min(values) else (1.0, 2.0, 5.0)
        panel.yaxis.set_major_locator(LogLocator(subs=steps))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    panel.grid(alpha=0.3)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
