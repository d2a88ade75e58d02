"""Tables of figures in pages, which are taken from committed benchmark rows.

A comment `<!-- rows of NAME, N decimals -->` before a table says that each number in it is a value
of `docs/benchmarks/NAME.csv`. The table's first cell is the unit, and the row's case is `FIRST CELL
OF THE LINE @ HEAD OF THE COLUMN`, or the first cell alone in a column with the head `value`. Where
there is no such row, the cell is `-`.

Below `<!-- claims -->` is the table of `docs/benchmarks/claims.toml`.
"""

import csv
import re
import tomllib
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from repository import PACKAGES, ROOT

PAGES = [
    ROOT / "README.md",
    *(package / "README.md" for package in PACKAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FOLDER = ROOT / "docs" / "benchmarks"
_CLAIMS = re.compile(r"(<!-- claims -->\n+)((?:\|.*\n)+)")
_TABLE = re.compile(r"(<!-- rows of (\w+), (\d) decimals? -->\n+)((?:\|.*\n)+)")

Rows = Mapping[tuple[str, str], str]
"""Values by case and unit."""


def rows_of(name: str) -> Rows:
    """The committed rows of a file in docs/benchmarks."""
    return {key: row["value"] for key, row in whole_rows_of(name).items()}


def whole_rows_of(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """The same with all columns."""
    with (_FOLDER / f"{name}.csv").open(newline="") as file:
        return {(row["case"], row["unit"]): row for row in csv.DictReader(file)}


def claims() -> list[dict[str, Any]]:
    """What the page of benchmarks claims, and the rows behind it."""
    found: list[dict[str, Any]] = tomllib.loads((_FOLDER / "claims.toml").read_text())["claim"]
    return found


def claims_table() -> str:
    """The claims with the values of their rows, and where these were measured."""
    lines = ["| | pcomm | compared with | measured on | again |", "|---|---|---|---|---|"]
    for claim in claims():
        name, *key = claim["ours"]
        row = whole_rows_of(name)[tuple(key)]
        ours, theirs = (_claimed(claim, side) for side in ("ours", "theirs"))
        on, again = f"{row['hardware']}, {row['cores']} cores", f"`{claim['again']}`"
        cells = [claim["says"], f"**{ours}**", f"{theirs}: {claim['against']}", on, again]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _claimed(claim: Mapping[str, Any], side: str) -> str:
    name, *key = claim[side]
    value = Decimal(rows_of(name)[tuple(key)]) * Decimal(str(claim.get("times", 1)))
    return f"{rounded(str(value), claim['decimals'])} {claim['unit']}".strip()


def tables_in(page: str) -> list[tuple[str, int, str]]:
    """Each marked table of a page: name of its rows, decimals, lines."""
    return [(name, int(digits), table) for _, name, digits, table in _TABLE.findall(page + "\n")]


def filled(page: str) -> str:
    """A page whose marked tables show what the committed rows say."""

    def fill(match: re.Match[str]) -> str:
        mark, name, digits, table = match.groups()
        return mark + fill_table(table, rows_of(name), int(digits))

    return _TABLE.sub(fill, _CLAIMS.sub(lambda found: found[1] + claims_table(), page))


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
