"""Rows for a reader: tables as wide as the terminal, and how rows differ from earlier ones."""

from __future__ import annotations

import shutil
import statistics
import textwrap
from collections.abc import Iterator, Sequence

from core_bench.rows import Row

__all__ = ["differences", "grid", "lines_of", "table", "tables", "told"]

# What differs less than this from an earlier row is counted, and not shown.
_SAME = 0.05


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def told(text: str) -> str:
    """A paragraph in lines that fit."""
    return textwrap.fill(text, width())


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row; the case has one of its own where both do not fit."""
    values = [f"{one.value:>9.3f} {one.unit}" for one in rows]
    ratios = ["" if one.ratio is None else f"  {one.ratio:.3f} x {one.ratio_to}" for one in rows]
    longest = max((len(one.case) for one in rows), default=0)
    beside = min(longest, width() - max(map(len, values), default=0) - 1)
    for one, value, ratio in zip(rows, values, ratios, strict=True):
        if len(one.case) > beside:
            yield one.case
        line = f"{one.case if len(one.case) <= beside else '':<{beside}} {value}"
        yield line if len(line + ratio) > width() else line + ratio
        if ratio and len(line + ratio) > width():
            yield from textwrap.wrap(
                ratio.strip(), width(), initial_indent="    ", subsequent_indent="    "
            )


def table(lines: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Columns as wide as their cells: the first one to the left, the others to the right.

    Where they do not fit beside each other, the rest follows below, again with the first column
    and without lines that have nothing but dashes there.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, columns = widths[0], list(range(1, len(widths)))
    while columns:
        used, count = len(indent) + first, 0
        for column in columns:
            used += 2 + widths[column]
            if count and used > width():
                break
            count += 1
        now, columns = columns[:count], columns[count:]
        for line in lines:
            if any(line[at] != "-" for at in now):
                cells = [line[0].ljust(first), *(line[at].rjust(widths[at]) for at in now)]
                yield indent + "  ".join(cells).rstrip()
        if columns:
            yield ""


def grid(rows: Sequence[Row], *, indent: str = "  ") -> Iterator[str]:
    """A table of rows of one unit, whose names are `case @ place`.

    It has a column for each place, or a line where there are more places than cases.
    """
    values = {tuple(one.case.split(" @ ")): f"{one.value:.4g}" for one in rows}
    cases = dict.fromkeys(case for case, _ in values)
    places = dict.fromkeys(place for _, place in values)
    if len(indent) + max(map(len, cases)) + 2 + max(map(len, places)) > width():
        # Not even one column fits beside the names, so each place has lines of its own.
        for place in places:
            yield indent + place
            found = [[case, values[case, place]] for case in cases if (case, place) in values]
            yield from table(found, indent=2 * indent)
        return
    lines = [[case, *(values.get((case, place), "-") for place in places)] for case in cases]
    lines = [["", *places], *lines]
    turn = [[*one] for one in zip(*lines, strict=True)]
    yield from table(turn if len(places) > len(cases) else lines, indent=indent)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """For each unit a grid of the rows that have a place, and a line for each other one."""
    for unit in dict.fromkeys(one.unit for one in rows):
        these = [one for one in rows if one.unit == unit]
        placed = [one for one in these if " @ " in one.case]
        yield from ("", f"{unit}:")
        yield from grid(placed) if placed else ()
        yield from lines_of([one for one in these if one not in placed])


def differences(rows: Sequence[Row], earlier: Sequence[Row]) -> Iterator[str]:
    """What was measured, over the same of an earlier run, and whether the machines were the same.

    Rows are the same by their case and unit. Those that differ by more than 5 % are shown.
    """
    before = {(one.benchmark, one.case, one.unit): one for one in earlier}
    pairs = [
        (one, before[key])
        for one in rows
        if (key := (one.benchmark, one.case, one.unit)) in before and before[key].value
    ]
    if not pairs:
        yield told("No row is in both runs: other settings, such as --quick, have other rows.")
        return
    yield ""
    for what in ("hardware", "cores", "torch", "python"):
        now, then = ({getattr(pair[at], what) for pair in pairs} for at in (0, 1))
        if now != then:
            both = [", ".join(map(str, sorted(one))) for one in (now, then)]
            yield told(f"Another {what}, {both[0]} and not {both[1]}: ratios may be that.")
    ratios = [one.value / other.value for one, other in pairs]
    changed = [index for index, ratio in enumerate(ratios) if abs(ratio - 1) > _SAME]
    yield told(
        f"{len(pairs)} rows are in both runs, {len(changed)} of them differ by more than "
        f"{_SAME:.0%}. Now over then, the median of all: {statistics.median(ratios):.3f}."
    )
    for index in changed:
        one, other = pairs[index]
        shown = f"{ratios[index]:.3f} x  ({one.value:.4g} and {other.value:.4g} {one.unit})"
        line = f"  {one.case}  {shown}"
        yield from [line] if len(line) <= width() else [f"  {one.case}", f"      {shown}"]
