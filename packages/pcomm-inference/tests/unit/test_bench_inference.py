"""`pcomm bench inference` from end to end."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest
import torch.distributed as dist

from inference_bench.command import command
from inference_bench.measure import BARE


def test_a_quick_run_writes_its_rows_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture, and is no requirement")
    rows, image = tmp_path / "inference.csv", tmp_path / "new" / "inference.png"
    words = ["--quick", "--streams", "2,3", "--contexts", "16", "--rows", "3"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words += ["--csv", str(rows), "--plot", str(image.parent)]
    assert command.run(parser.parse_args(words)) == 0
    assert not dist.is_initialized()
    with rows.open(newline="") as file:
        found = {(row["case"], row["unit"]): row for row in csv.DictReader(file)}
    assert {row["benchmark"] for row in found.values()} == {"inference"}
    assert {(f"{case}, more than {bare}", "us") for case, bare in BARE.items()} <= set(found)
    place = "tiny, threads 1, streams 2, context 64"
    step = found[f"step @ {place}", "ms"]
    assert step["ratio_to"] == f"linears alone @ {place}"
    tokens = float(found[f"tokens @ {place}", "tokens/s"]["value"])
    assert tokens == pytest.approx(2 / float(step["value"]) * 1e3, rel=0.01)
    assert ("step of 3 rows without a model", "us") in found
    for form in ("packed", "int8", "batch-invariant"):
        row = found[f"linears, {form} weights @ tiny, threads 1, rows 8", "ms"]
        assert row["ratio_to"] == "linears, F.linear @ tiny, threads 1, rows 8"
    assert image.read_bytes().startswith(b"\x89PNG")
