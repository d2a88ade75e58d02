"""Compares tables of figures in pages with the committed rows that they are taken from."""

from __future__ import annotations

import pytest

from repository import ROOT
from row_tables import PAGES, case_of, cells, fill_table, filled, rows_of, tables_in

TABLES = [
    (str(page.relative_to(ROOT)), name, table)
    for page in PAGES
    for name, _, table in tables_in(page.read_text())
]


@pytest.mark.parametrize(("page", "name", "table"), TABLES, ids=lambda part: part[:40].strip())
def test_figures_are_those_of_the_rows(page, name, table):
    """Read apart from what writes them: every number is a row, every dash is none."""
    rows = rows_of(name)
    (unit, *places), _, *lines = (cells(line) for line in table.strip().splitlines())
    units = {unit for _, unit in rows}
    for case, *figures in lines:
        for place, figure in zip(places, figures, strict=True):
            value = rows.get((case_of(case, place), unit))
            where = f"{page}: {case} @ {place}, {unit}"
            assert (figure == "-") == (value is None), f"{where}: {figure}, the row has {value}"
            if value is not None:
                digits = len(figure.partition(".")[2])
                half = 0.5 * 10**-digits + 1e-9
                assert abs(float(figure) - float(value)) <= half, f"{where}: {figure} for {value}"
    assert unit in units or all(figure == "-" for line in lines for figure in line[1:])


@pytest.mark.parametrize("page", [p for p in PAGES if tables_in(p.read_text())], ids=str)
def test_pages_are_as_the_tool_writes_them(page):
    text = page.read_text()  # type: ignore[attr-defined]
    assert filled(text) == text, "run `python tools/reference_pages.py`"


def test_pages_with_rows_are_found():
    assert {name for _, name, _ in TABLES} >= {"core", "fsdp"}
    # A mark that is spelt otherwise would leave its table unread.
    marks = sum(page.read_text().count("<!-- rows of") for page in PAGES)
    assert marks == len(TABLES)


def test_a_table_is_filled_from_the_rows():
    rows = {("ours @ 2 ranks", "ms"): "391.27", ("ours @ 4 ranks", "ms"): "1614.5"}
    table = "| ms | 2 ranks | 4 ranks | 8 ranks |\n|---|---|---|---|\n| `ours` | 1 | 2 | 3 |\n"
    assert fill_table(table, rows, 0).splitlines()[2] == "| `ours` | 391 | 1614 | - |"
    assert fill_table(table, rows, 1).splitlines()[2] == "| `ours` | 391.3 | 1614.5 | - |"
    alone = "| us | value |\n|---|---|\n| `a call` | 1 |\n"
    assert fill_table(alone, {("a call", "us"): "0.25"}, 2).splitlines()[2] == "| `a call` | 0.25 |"
    page = (
        "text\n\n<!-- rows of fsdp, 0 decimals -->\n| ms | nowhere |\n|---|---|\n| a | 7 |\n\nmore"
    )
    assert filled(page) == page.replace("7", "-")
