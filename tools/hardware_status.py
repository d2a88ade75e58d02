"""Write docs/hardware-status.md: what ran on which hardware, when, and by which command.

    python tools/hardware_status.py

Rows for GPUs come from the list of `first_gpu_hour.py` and from the tests in folders `tests/gpu`,
their results from `docs/hardware/NAME.jsonl`: the `lines.jsonl` that a call of that program leaves.
Rows for CPUs come from the columns of `docs/benchmarks/*.csv`. A test compares the page.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from first_gpu_hour import GROUPS, STAGES, Command
from repository import PACKAGES, ROOT

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "hardware-status.md"
RESULTS = ROOT / "docs" / "hardware"
NEVER = "never run"

_HEAD = """\
# Hardware status

What needs a GPU, and where it ran; then where the benchmarks of CPUs ran.
`python tools/hardware_status.py` writes this page from results.

## On GPUs

One command gives a group of rows ten minutes (`--within`). Without a GPU it says what it would have
run, and ends with 0:

```bash
python tools/first_gpu_hour.py --out runs/gpu --group A
```

The file `runs/gpu/lines.jsonl`, copied to `docs/hardware/NAME.jsonl`, fills the rows. In
`runs/gpu/predictions.md` each number that is predicted of [kernels](gpu-kernels.md) and of
[launches](gpu-counts.md) has what was measured of it beside it, or why nothing was; the tool
`gpu_predictions.py` writes it again from such a file.
"""
_TESTS = """
### Tests that need a GPU

| tests | what they compare | ran |
|---|---|---|
"""
_CPU = """
## On CPUs

| benchmark | hardware | torch | newest row | command |
|---|---|---|---|---|
"""


def page(results: Path = RESULTS) -> str:
    """The text of the page, from the results in a folder."""
    newest = newest_lines(results)
    text = _HEAD
    for letter, (low, high) in GROUPS.items():
        text += f"\n### Group {letter}\n\n| what | it answers | ran |\n|---|---|---|\n"
        for stage in STAGES:
            if low <= stage.number <= high:
                asked = f"{stage.question}?"
                for command in filter(lambda one: one.needs_gpu, stage.commands):
                    ran = told(newest.get(command.name))
                    text += f"| {command.name} | {asked} | {ran} |\n"
                    asked = "as above"
    text += _TESTS
    for path in gpu_test_files():
        ran = told_of(path, newest)
        text += f"| `{path.relative_to(ROOT)}` | {first_line_of(path)} | {ran} |\n"
    return text + _CPU + "".join(cpu_rows())


def newest_lines(results: Path) -> dict[str, dict[str, Any]]:
    """The newest line of each command that was run to its end, with its hardware."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob("*.jsonl")):
        hardware = "hardware unknown"
        for line in map(json.loads, path.read_text().splitlines()):
            for row in line.get("rows", ()):
                if names := row.get("names"):
                    hardware = f"{len(names)} x {names[0]}, torch {row['torch']}"
            known = found.get(line["name"])
            if "seconds" in line and (known is None or known["date"] <= line["date"]):
                found[line["name"]] = {**line, "hardware": hardware}
    return found


def told(line: dict[str, Any] | None) -> str:
    """A cell: when, where and how it ended, or that it never ran."""
    if line is None:
        return NEVER
    # A test that a machine cannot run is skipped, and pytest ends well all the same.
    counts = [text for text in line.get("last", ()) if re.search(r"\d (passed|skipped)", text)]
    how = f"{line['status']}: {counts[-1].strip('= ')}" if counts else line["status"]
    return f"{how}, {line['date']}, {line['hardware']}"


def told_of(path: Path, newest: Mapping[str, dict[str, Any]]) -> str:
    """The cell of a file of tests, by the commands that run it."""
    lines = [newest[one.name] for one in commands_of(path) if one.name in newest]
    for line in lines:
        for text in line.get("last", ()):
            if text.startswith("SKIPPED") and f"/{path.name}:" in text:
                return f"skipped, {line['date']}, {line['hardware']}"
    return told(lines[0] if lines else None)


def gpu_test_files() -> list[Path]:
    """The files of tests that need a GPU, in all packages."""
    found = (path for package in PACKAGES for path in package.glob("tests/gpu/test_*.py"))
    return sorted(found)


def commands_of(path: Path) -> Iterator[Command]:
    """Those of the list that run a file of tests."""
    place = path.relative_to(ROOT)
    for stage in STAGES:
        for command in stage.commands:
            words = list(command.words)
            left_out = {words[n + 1] for n, word in enumerate(words) if word == "--deselect"}
            named = [ROOT / word for word in words if "tests" in word and word not in left_out]
            if str(place) not in left_out and any(path.is_relative_to(one) for one in named):
                yield command


def first_line_of(path: Path) -> str:
    """What a file of tests says that it compares."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.splitlines()[0].partition("; never run")[0].rstrip(".:") if text else ""


def cpu_rows() -> Iterator[str]:
    """A row for each command of each file: its benchmarks, and the hardware that it ran on."""
    newest: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in sorted((ROOT / "docs" / "benchmarks").glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                # A recorded run has runs in place of benchmarks.
                key = path.stem, row.get("benchmark", ""), row["hardware"]
                if key not in newest or newest[key]["date"] <= row["date"]:
                    newest[key] = row
    parts: dict[tuple[str, ...], list[str]] = {}
    for (name, benchmark, hardware), row in newest.items():
        facts = [row[column] for column in ("cores", "torch", "date", "commit", "command")]
        parts.setdefault((name, hardware, *facts), []).append(benchmark.removeprefix(name).strip())
    for (name, hardware, cores, torch, date, commit, command), benchmarks in parts.items():
        what = f"{name}: {', '.join(benchmarks)}" if any(benchmarks) else name
        # Where the interpreter lies on that machine tells nobody anything.
        words = [word.removeprefix(".nox/environment/bin/") for word in shlex.split(command)]
        shown = shlex.join(words).removeprefix("python pcomm").strip()
        again = f"pcomm {shown}" if words[:2] == ["python", "pcomm"] else shown
        yield (
            f"| {what} | {hardware}, {cores} cores | {torch.partition(',')[0]} | {date}, "
            f"`{commit}` | `{again}` |\n"
        )


if __name__ == "__main__":
    PAGE.write_text(page())
