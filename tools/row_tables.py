"""Tables of figures in pages, which are taken from committed benchmark rows.

A comment `<!-- rows of NAME, N decimals -->` before a table says that each number in it is a value
of `docs/benchmarks/NAME.csv`. The table's first cell is the unit, and the row's case is `FIRST CELL
OF THE LINE @ HEAD OF THE COLUMN`, or the first cell alone in a column with the head `value`. Where
there is no such row, the cell is `-`.
"""

import csv
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal

from repository import PACKAGES, ROOT

PAGES = [
    ROOT / "README.md",
    *(package / "README.md" for package in PACKAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_TABLE = re.compile(r"(<!-- rows of (\w+), (\d) decimals? -->\n+)((?:\|.*\n)+)")

Rows = Mapping[tuple[str, str], str]
"""Values by case and unit."""


def rows_of(name: str) -> Rows:
    """The committed rows of a file in docs/benchmarks."""
    with (ROOT / "docs" / "benchmarks" / f"{name}.csv").open(newline="") as file:
        return {(row["case"], row["unit"]): row["value"] for row in csv.DictReader(file)}


def tables_in(page: str) -> list[tuple[str, int, str]]:
    """Each marked table of a page: name of its rows, decimals, lines."""
    return [(name, int(digits), table) for _, name, digits, table in _TABLE.findall(page + "\n")]


def filled(page: str) -> str:
    """A page whose marked tables show what the committed rows say."""

    def fill(match: re.Match[str]) -> str:
        mark, name, digits, table = match.groups()
        return mark + fill_table(table, rows_of(name), int(digits))

    return _TABLE.sub(fill, page)


def fill_table(table: str, rows: Rows, num_decimals: int) -> str:
    """A table with the values of its rows in all cells."""
    head, rule, *lines = table.strip().splitlines()
    unit, *places = cells(head)
    found = [head, rule]
    for line in lines:
        case = cells(line)[0]
        values = [rows.get((case_of(case, place), unit)) for place in places]
        shown = ["-" if value is None else rounded(value, num_decimals) for value in values]
        found.append("| " + " | ".join([case, *shown]) + " |")
    return "\n".join(found) + "\n"


def case_of(first_cell: str, place: str) -> str:
    """The case of a row, by the first cell of its line and the head of its column."""
    name = plain(first_cell)
    return name if place == "value" else f"{name} @ {place}"


def rounded(value: str, num_decimals: int) -> str:
    """A value as it stands in a table."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-num_decimals), ROUND_HALF_EVEN))


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def plain(cell: str) -> str:
    """A cell without marks of emphasis."""
    return cell.strip("`*")
