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

`pcomm bench` lists those that come with the installed packages, and runs one:

```bash
pcomm bench gdn-cp --quick
pcomm bench gdn-cp --csv docs/benchmarks/gdn_cp.csv --plot docs/benchmarks/gdn_cp.png
pcomm bench inference --csv docs/benchmarks/inference.csv --plot docs/benchmarks/inference.png
pcomm bench serving --csv docs/benchmarks/serving.csv --plot docs/benchmarks/serving.png \\
    --report docs/benchmarks/serving.note
pcomm bench nvls --csv docs/benchmarks/nvls.csv
pcomm bench ntp --csv docs/benchmarks/ntp.csv
pcomm bench ntp --parts simulated --csv docs/benchmarks/ntp_simulated.csv \\
    --plot docs/benchmarks/ntp_simulated.png
pcomm bench fsdp --csv docs/benchmarks/fsdp.csv --plot docs/benchmarks/fsdp.png
```

The last one gives each rank a network namespace with rate-limited links: it needs root, on Linux.
`serving` needs transformers, which it compares with. A section whose name ends in `simulated` holds
predictions: nothing in it was measured.
"""

# Files of predictions end in this.
SIMULATED = "_simulated"

# What a reader compares; every other column says where the numbers come from.
SHOWN = ("case", "value", "unit", "ratio", "ratio_to")


# Between what was measured and where, in the cases of a benchmark that fill a grid.
AT = " @ "


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a folder, by name; a recorded run is none, and has a page of its own."""
    return [p for p in sorted(folder.glob("*.csv")) if p.read_text().startswith("benchmark,")]


def text(files: list[Path]) -> str:
    """The whole page: a section for each file, in it one for each benchmark."""
    return HEAD + "".join(
        f"\n## {path.stem}\n{picture(path)}{note(path)}{sections(path)}" for path in files
    )


def picture(path: Path) -> str:
    """The picture beside a file of rows, where there is one of the same name."""
    image = path.with_suffix(".png")
    done = "predicted" if path.stem.endswith(SIMULATED) else "measured"
    return f"\n![What was {done} in {path.stem}]({image.name})\n" if image.exists() else ""


def note(path: Path) -> str:
    """What stands beside a file of rows in one of the same name, for readers of its figures."""
    words = path.with_suffix(".note")
    return f"\n{words.read_text()}" if words.exists() else ""


def sections(path: Path) -> str:
    """The benchmarks of a file, whose rows stand together there."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    groups = itertools.groupby(rows, key=lambda row: row["benchmark"])
    return "".join(f"\n### {name}\n\n{section(list(group))}" for name, group in groups)


def section(rows: list[dict[str, str]]) -> str:
    """The rows of a benchmark as tables, under what they have in common."""
    origin = [column for column in rows[0] if column not in (*SHOWN, "benchmark")]
    lines = [f"- {column}: {' or '.join(distinct(rows, column))}" for column in origin]
    if plain := [row for row in rows if AT not in row["case"]]:
        lines += ["", line_of(list(SHOWN)), "|" + "---|" * len(SHOWN)]
        lines += [line_of([row[column] for column in SHOWN]) for row in plain]
    grids = [row for row in rows if AT in row["case"]]
    for unit in distinct(grids, "unit"):
        lines += ["", *grid([row for row in grids if row["unit"] == unit], unit)]
    return "\n".join(lines) + "\n"


def grid(rows: list[dict[str, str]], unit: str) -> list[str]:
    """A column for each case and a line for each place, with ratios in brackets."""
    values = {tuple(row["case"].split(AT)): cell(row) for row in rows}
    names = list(dict.fromkeys(name for name, _ in values))
    places = list(dict.fromkeys(place for _, place in values))
    lines = [line_of([unit, *names]), "|" + "---|" * (1 + len(names))]
    lines += [line_of([at, *(values.get((name, at), "-") for name in names)]) for at in places]
    divided = [(row["case"].split(AT)[0], row["ratio_to"].split(AT)[0]) for row in rows]
    others = list(dict.fromkeys(f"{name} / {other}" for name, other in divided if other))
    return [*lines, "", f"In brackets: {', '.join(others)}."] if others else lines


def cell(row: dict[str, str]) -> str:
    """A value, rounded to what can be told apart, and its ratio to another column."""
    value = f"{float(row['value']):.4g}"
    return f"{value} ({float(row['ratio']):.2f})" if row["ratio"] else value


def distinct(rows: list[dict[str, str]], column: str) -> list[str]:
    """The different values of a column, in order; commands and texts as they are."""
    return list(dict.fromkeys(row[column] or "-" for row in rows))


def line_of(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
