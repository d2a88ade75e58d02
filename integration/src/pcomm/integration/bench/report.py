"""What was measured: rows of a CSV, and goals beside what was reached, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pcomm.core.testing.timing import Row
from pcomm.integration.bench.rows import Found, Goal

__all__ = ["goals_of", "report_of", "rows_of"]


def rows_of(measured: Sequence[Found]) -> list[Row]:
    """The rows of all parts."""
    return [row for found in measured for row in found.rows]


def goals_of(measured: Sequence[Found]) -> list[Goal]:
    """The goals of all parts."""
    return [goal for found in measured for goal in found.goals]


def report_of(measured: Sequence[Found]) -> str:
    """Goals, then all rows by part, as Markdown."""
    lines = [goal_table(goals_of(measured))]
    for part, several in itertools.groupby(measured, key=lambda found: found.part):
        rows = [row for found in several for row in found.rows]
        lines += ["", f"**{part}**", "", *_row_lines(rows)]
    return "\n".join(lines)


def goal_table(goals: Sequence[Goal]) -> str:
    """A Markdown table with a line for each goal."""
    lines = ["| measured | goal | reached | met |", "|---|---|---|---|"]
    for goal in goals:
        bound = f"at {'most' if goal.is_most else 'least'} {goal.limit:.4g}"
        met = "yes" if goal.is_met else "no"
        lines.append(f"| {goal.what} | {bound} | {goal.reached:.3g} | {met} |")
    return "\n".join(lines)


def _row_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from ["| case | value | unit | ratio |", "|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x {row.ratio_to.split(' @ ')[0]}"
        yield f"| {row.case} | {row.value:.4g} | {row.unit} | {ratio} |"
