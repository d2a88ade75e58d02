"""The benchmark as it is run without a GPU."""

import argparse
import csv

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_bench.command import command
from nvls_bench.on_host import BASELINES, DECISION
from pcomm.nvls.policy.table import OPERATIONS


def test_a_quick_run_writes_its_rows(tmp_path):
    table, parser = tmp_path / "rows.csv", argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--quick", "--csv", str(table)])) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    host = [row for row in rows if row["benchmark"] == "nvls host"]
    cases = sorted([*BASELINES, *BASELINES.values(), DECISION])
    assert sorted(row["case"] for row in host) == cases
    assert {row["case"]: row["ratio_to"] for row in host if row["ratio"]} == BASELINES
    kernels = {row["case"]: row for row in rows if row["benchmark"] == "nvls compile"}
    assert len(kernels) == 5 * sum(len(spec.algorithms) for spec in OPERATIONS.values())
    assert kernels["registers @ all_reduce, multimem, sm_90"]["unit"] == "of a thread"
