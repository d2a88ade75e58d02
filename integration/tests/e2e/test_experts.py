"""`pcomm train` with experts: two ranks that share them give the numbers of one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_support.short_runs import (
    allowed_by_rounding,
    assert_same_numbers,
    numbers,
    settings,
)
from pcomm.core.cli import main
from pcomm.integration.checkpoint.folders import checkpoints

Train = Callable[..., int]

SETTINGS = {
    "model.experts": "4",
    "model.expert_width": "32",
    "model.shared_expert_width": "16",
    "train.steps": "4",
    "train.eval_every": "4",
    "checkpoint.every": "2",
    "sample.max_tokens": "4",
}


def options(*overrides: str) -> list[str]:
    return settings(SETTINGS, *overrides)


@pytest.fixture(scope="module")
def one(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run on one process, and how far rounding may move its numbers."""
    folder = tmp_path_factory.mktemp("one")
    assert train(folder / "whole", *options()) == 0
    assert train(folder / "parts", *options("train.micro_batch_tokens=32")) == 0
    return folder / "whole", allowed_by_rounding(folder / "whole", folder / "parts")


@pytest.mark.parametrize(
    "parallel",
    [["dp=2", "ep=2"], ["tp=2", "ep=2"], ["cp=2"]],
    ids=["dp2 ep2", "tp2 ep2", "cp2 ep1"],
)
def test_ranks_that_share_experts_give_the_numbers_of_one_process(train, tmp_path, parallel, one):
    two = tmp_path / "two"
    shared = options(*(f"parallel.{size}" for size in parallel))
    assert train(two, *shared, "--ranks", "2") == 0
    assert_same_numbers(two, *one)
    # What two ranks saved half-way is read by one, which goes on to the same end.
    shutil.rmtree(checkpoints(two)[-1].folder)
    assert train(two, *options()) == 0
    assert_same_numbers(two, *one)


def test_bf16_trains_and_writes(train, tmp_path, capsys):
    assert train(tmp_path, *options("train.dtype=bf16")) == 0
    assert main(["generate", str(tmp_path), "--prompt", "word", "--max-tokens", "4"]) == 0
    assert "word" in capsys.readouterr().out
    rows = numbers(tmp_path)
    balance = [value for key, _, value in rows if key == "balance_loss"]
    # 1 is perfectly even; all tokens on 2 of 4 experts would be near 2.
    assert len(balance) == 4
    assert all(0.9 < value < 1.5 for value in balance)


def test_experts_that_ranks_cannot_share_are_refused(train, tmp_path, capsys):
    words = options("model.experts=3", "parallel.ep=2")
    assert train(tmp_path / "run", *words, "--ranks", "2") != 0
    assert "model.experts is 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
