"""`pcomm bench serving --quick`: every part from end to end, and the rows that it writes."""

from __future__ import annotations

import argparse
import csv
from dataclasses import fields

import pytest

from core_bench.rows import Row
from serving_bench.command import command
from serving_bench.settings import PARTS, QUICK


@pytest.mark.soak
def test_rows_of_every_part_name_what_they_are_compared_with_and_no_token_is_lost(tmp_path):
    for package in ("transformers", "matplotlib", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="the benchmark stands on it")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    names = {"--csv": "rows.csv", "--plot": "new", "--report": "new/report.md"}
    paths = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert command.run(parser.parse_args(["--quick", *paths])) == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        listed = list(csv.DictReader(file))
    rows = {(row["case"], row["unit"]): row for row in listed}
    assert len(rows) == len(listed), "a case has two values of one unit"
    assert {row["benchmark"] for row in listed} == {f"serving {part}" for part in PARTS}
    for (case, unit), row in rows.items():
        assert set(row) == {column.name for column in fields(Row)}
        assert ", transformers " in row["torch"]
        if row["ratio_to"]:
            assert (row["ratio_to"], unit) in rows, case
            assert float(row["ratio"]) > 0
    # Both write the same: the streams, the tiny model, and two recurrent models of two contexts.
    equal = {key: row for key, row in rows.items() if key[0].startswith("equal tokens")}
    assert len(equal) == 7
    for (case, unit), row in equal.items():
        assert unit == f"of {int(float(row['value']))} tokens", case
    for shape in ("GPT", "hybrid"):
        case = f"nine tenths cached @ {shape}, {QUICK.prefix_prompt} tokens"
        assert float(rows[case, "cached tokens"]["value"]) == 0.9 * QUICK.prefix_prompt
    lost = [float(row["value"]) for (_, unit), row in rows.items() if "tokens lost" in unit]
    assert lost == [0]
    report = (tmp_path / "new" / "report.md").read_text().splitlines()
    assert sum(line.endswith(("| yes |", "| no |")) for line in report) == 10
    assert (tmp_path / "new" / "serving.png").read_bytes().startswith(b"\x89PNG")
