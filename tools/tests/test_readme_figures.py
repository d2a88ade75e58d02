"""Compares tables of figures in READMEs with the committed rows that they are taken from.

A comment `<!-- rows of NAME -->` before a table says that each number in it is a value of
`docs/benchmarks/NAME.csv`: the table's first cell is the unit, and the row's case is
`FIRST CELL OF THE LINE @ HEAD OF THE COLUMN`. A number may have fewer digits than the row.
"""

from __future__ import annotations

import csv
import re
from decimal import ROUND_HALF_EVEN, Decimal

import pytest

from repository import PACKAGES, ROOT

MARK = re.compile(r"<!-- rows of (\w+) -->\n+((?:\|.*\n)+)")
PAGES = ["README.md", *(f"{package.relative_to(ROOT)}/README.md" for package in PACKAGES)]
TABLES = [
    (page, name, table)
    for page in PAGES
    for name, table in MARK.findall((ROOT / page).read_text() + "\n")
]


def rows_of(name: str) -> dict[tuple[str, str], str]:
    """Values by case and unit."""
    with (ROOT / "docs" / "benchmarks" / f"{name}.csv").open(newline="") as file:
        return {(row["case"], row["unit"]): row["value"] for row in csv.DictReader(file)}


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")]


def differences(table: str, rows: dict[tuple[str, str], str]) -> list[str]:
    """What a table says that the rows do not say."""
    (unit, *places), _, *lines = (cells(line) for line in table.strip().splitlines())
    found = []
    for case, *figures in lines:
        for place, figure in zip(places, figures, strict=True):
            value = rows.get((f"{case} @ {place}", unit))
            if value is None:
                found.append(f"no row {case} @ {place}, {unit}")
                continue
            shown = Decimal(figure.replace(",", ""))
            rounded = Decimal(value).quantize(shown, rounding=ROUND_HALF_EVEN)
            if shown != rounded:
                found.append(f"{case} @ {place}, {unit}: {figure}, the row has {value}")
    return found


@pytest.mark.parametrize(("page", "name", "table"), TABLES, ids=lambda part: part[:40].strip())
def test_figures_are_those_of_the_rows(page: str, name: str, table: str) -> None:
    assert not differences(table, rows_of(name))


def test_pages_with_rows_are_found() -> None:
    assert {name for _, name, _ in TABLES} >= {"fsdp"}


def test_a_figure_that_is_wrong_or_nobody_measured_is_found() -> None:
    rows = {("ours @ 2 ranks", "ms"): "391.27", ("ours @ 4 ranks", "ms"): "1614.3"}
    table = "| ms | 2 ranks | 4 ranks |\n|---|---|---|\n| `ours` | {} | {} |\n"
    assert differences(table.format("391", "1,614"), rows) == []
    assert differences(table.format("391.3", "1614.3"), rows) == []
    assert len(differences(table.format("392", "1,600"), rows)) == 2
    assert differences(table.replace("4 ranks", "8 ranks").format("391", "1"), rows) == [
        "no row ours @ 8 ranks, ms"
    ]
