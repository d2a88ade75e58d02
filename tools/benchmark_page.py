"""The page of the documentation that shows every committed benchmark row.

The rows are those of `pcomm.core.testing.timing`; `nox -s bench -- --save` writes them.
"""

import csv
import itertools
from pathlib import Path

HEAD = """\
# Benchmarks

A claim of speed is a row in a committed CSV with hardware, versions, date and command. What has not
run on real hardware is not claimed, and nothing has been measured on a GPU so far. The tables are
made from the files beside this page; only ratios of one run mean much on another machine. To
measure on yours, and to keep the rows:

```bash
python3 -m nox -s bench
python3 -m nox -s bench -- --save
```
"""

# What a reader compares; every other column says where the numbers come from.
SHOWN = ("case", "value", "unit", "ratio", "ratio_to")


def text(files: list[Path]) -> str:
    """The whole page: a section for each file, in it one for each benchmark."""
    return HEAD + "".join(f"\n## {path.stem}\n{sections(path)}" for path in files)


def sections(path: Path) -> str:
    """The benchmarks of a file, whose rows stand together there."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    groups = itertools.groupby(rows, key=lambda row: row["benchmark"])
    return "".join(f"\n### {name}\n\n{section(list(group))}" for name, group in groups)


def section(rows: list[dict[str, str]]) -> str:
    """The rows of a benchmark as a table, under what they have in common."""
    origin = [column for column in rows[0] if column not in (*SHOWN, "benchmark")]
    facts = [f"- {column}: {' or '.join(distinct(rows, column))}" for column in origin]
    lines = [line_of(list(SHOWN)), "|" + "---|" * len(SHOWN)]
    lines += [line_of([row[column] for column in SHOWN]) for row in rows]
    return "\n".join([*facts, "", *lines]) + "\n"


def distinct(rows: list[dict[str, str]], column: str) -> list[str]:
    """The different values of a column, in order; commands and texts as they are."""
    return list(dict.fromkeys(row[column] or "-" for row in rows))


def line_of(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
