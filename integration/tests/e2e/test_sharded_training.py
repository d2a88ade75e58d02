"""`pcomm train` with `parallel.data = shard`: the same numbers, and checkpoints for anybody."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_support.short_runs import allowed_by_rounding, assert_same_numbers, settings
from pcomm.core.cli import main
from pcomm.integration.checkpoint.folders import checkpoints

Train = Callable[..., int]

# A hybrid of all mixers, with experts in every other block.
HYBRID = {
    "model.pattern": "GMGA",
    "model.layers": "4",
    "model.mamba_groups": "2",
    "model.mamba_state_dim": "16",
    "model.experts": "4",
    "model.moe_every": "2",
    "train.steps": "4",
    "train.eval_every": "4",
    "checkpoint.every": "2",
    "sample.max_tokens": "0",
}


@pytest.fixture(scope="module")
def one(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run on one process, and how far rounding may move its numbers."""
    folder = tmp_path_factory.mktemp("one")
    assert train(folder / "whole", *settings(HYBRID)) == 0
    assert train(folder / "parts", *settings(HYBRID, "train.micro_batch_tokens=64")) == 0
    return folder / "whole", allowed_by_rounding(folder / "whole", folder / "parts")


def test_a_checkpoint_of_four_shards_goes_on_on_two_and_on_one(train, tmp_path, one, capsys):
    out, sharded = tmp_path / "run", settings(HYBRID, "parallel.data=shard")
    assert train(out, *sharded, "--ranks", "4") == 0
    assert_same_numbers(out, *one)
    # And what shards have saved is read where nothing is sharded.
    for words in ((*sharded, "--ranks", "2"), sharded, settings(HYBRID)):
        shutil.rmtree(checkpoints(out)[-1].folder)
        assert [checkpoint.step for checkpoint in checkpoints(out)] == [2]
        assert train(out, *words) == 0
        assert_same_numbers(out, *one)
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "word", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("word")


def test_replicas_of_shards_with_tensor_parallelism(train, tmp_path, one):
    how = ("parallel.data=hybrid", "parallel.shard_ranks=1", "parallel.tp=2")
    out = tmp_path / "run"
    assert train(out, *settings(HYBRID, *how), "--ranks", "4") == 0
    assert_same_numbers(out, *one)
