"""`pcomm train` with sequences shared by two ranks gives the numbers of one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pcomm.integration.checkpoint.folders import checkpoints

Train = Callable[..., int]

# A micro-batch is one row, so that what the ranks share is cut inside a document.
SETTINGS = {
    "model.layers": "4",
    "model.mamba_groups": "2",
    "model.mamba_state_dim": "16",
    "train.steps": "4",
    "train.sequence_length": "64",
    "train.micro_batch_tokens": "64",
    "train.eval_every": "4",
    "checkpoint.every": "2",
    "sample.max_tokens": "0",
}


def options(**changes: str) -> list[str]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return [
        word for key, value in {**SETTINGS, **named}.items() for word in ("--set", f"{key}={value}")
    ]


def rows(run: Path) -> list[tuple[str, int, float]]:
    """Losses and bits per byte, in the order of the file."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "bits_per_byte")
    return [(key, row["step"], row[key]) for row in parsed for key in keys if key in row]


def assert_same(mine: Path, theirs: Path, allowed: float) -> None:
    found, expected = rows(mine), rows(theirs)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert len(found) == 5
    worst = max(abs(a[2] - b[2]) for a, b in zip(found, expected, strict=True))
    assert worst <= allowed, f"off by {worst:.2e}, allowed are {allowed:.2e}"


@pytest.mark.parametrize("pattern", ["A", "M", "G", "GGGA"])
def test_cp_2_gives_the_numbers_of_one_process(train: Train, tmp_path: Path, pattern: str) -> None:
    shared = options(model__pattern=pattern)
    assert train(tmp_path / "one", *shared) == 0
    # Another order of the same sums, here over all rows at once, shows what rounding does.
    at_once = options(model__pattern=pattern, train__micro_batch_tokens="256")
    assert train(tmp_path / "sums", *at_once) == 0
    pairs = zip(rows(tmp_path / "one"), rows(tmp_path / "sums"), strict=True)
    rounding = max(abs(a[2] - b[2]) for a, b in pairs)
    # 1e-6 is a unit in the last place of a loss in fp32, where that was by chance 0.
    allowed = 8 * max(rounding, 1e-6)
    assert allowed < 1e-3
    assert train(tmp_path / "two", *shared, "--ranks", "2", "--set", "parallel.cp=2") == 0
    assert_same(tmp_path / "two", tmp_path / "one", allowed)
    if pattern == "GGGA":
        # What two ranks saved half-way is read by one, which goes on to the same end.
        shutil.rmtree(checkpoints(tmp_path / "two")[-1].folder)
        assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "two")] == [2]
        assert train(tmp_path / "two", *shared) == 0
        assert_same(tmp_path / "two", tmp_path / "one", allowed)
