"""`pcomm train` on several ranks gives the numbers of one process, and checkpoints for anybody."""

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

EVERY = {"train.steps": "4", "train.eval_every": "4", "checkpoint.every": "2"}
GROUPS = {"model.layers": "3", "model.mamba_groups": "2", "model.mamba_state_dim": "16"}
# A micro-batch is one row, so that what the ranks share is cut inside a document.
ROWS = {**EVERY, **GROUPS, "train.sequence_length": "64", "train.micro_batch_tokens": "64"}
EXPERTS = {"model.experts": "4", "model.expert_width": "32", "model.shared_expert_width": "16"}
MIXED = {"model.experts": "4", "model.moe_every": "2", "model.pattern": "GMA"}
# A row for each of four ranks.
FEW = {"train.global_batch_tokens": "128"}
# With a size of micro-batches that adds up in another order.
MODELS = {
    "attention": ({**ROWS, "model.pattern": "A"}, 256),
    "hybrid": ({**ROWS, "model.pattern": "GMA"}, 256),
    "experts": ({**EVERY, **EXPERTS}, 32),
    "hybrid with experts": ({**EVERY, **GROUPS, **MIXED, **FEW}, 64),
}


def words(model: str, *overrides: str) -> list[str]:
    return settings({**MODELS[model][0], "sample.max_tokens": "0"}, *overrides)


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory) -> Callable[[str], tuple[Path, float]]:
    """`alone(model)`: the run on one process, and how far rounding may move its numbers."""
    made: dict[str, tuple[Path, float]] = {}

    def get(model: str) -> tuple[Path, float]:
        if model not in made:
            whole, parts = (tmp_path_factory.mktemp("one") / name for name in ("whole", "parts"))
            assert train(whole, *words(model)) == 0
            assert train(parts, *words(model, f"train.micro_batch_tokens={MODELS[model][1]}")) == 0
            made[model] = whole, allowed_by_rounding(whole, parts)
        return made[model]

    return get


@pytest.mark.parametrize(
    ("model", "parallel", "ranks"),
    [
        pytest.param("attention", "cp=2", 2, marks=pytest.mark.soak),
        # By ranks of tests, without the command, the gate has these.
        pytest.param("hybrid", "cp=2", 2, marks=pytest.mark.soak),
        pytest.param("experts", "dp=2 ep=2", 2, marks=pytest.mark.soak),
        pytest.param("experts", "tp=2 ep=2", 2, marks=pytest.mark.soak),
        pytest.param("experts", "cp=2", 2, marks=pytest.mark.soak),
        ("hybrid with experts", "data=hybrid shard_ranks=1 tp=2", 4),
    ],
)
def test_ranks_give_the_numbers_of_one_process(train, tmp_path, alone, model, parallel, ranks):
    out, keys = tmp_path / "run", [f"parallel.{size}" for size in parallel.split()]
    assert train(out, *words(model, *keys), "--ranks", str(ranks)) == 0
    assert_same_numbers(out, *alone(model))
    # What ranks saved half-way is read by one, which goes on to the same end.
    shutil.rmtree(checkpoints(out)[-1].folder)
    assert train(out, *words(model)) == 0
    assert_same_numbers(out, *alone(model))


def test_a_checkpoint_of_four_shards_goes_on_on_two_and_on_one(train, tmp_path, alone, capsys):
    model, out = "hybrid with experts", tmp_path / "run"
    sharded = words(model, "parallel.data=shard")
    assert train(out, *sharded, "--ranks", "4") == 0
    assert_same_numbers(out, *alone(model))
    # And what shards have saved is read where nothing is sharded.
    for these in ((*sharded, "--ranks", "2"), sharded, words(model)):
        shutil.rmtree(checkpoints(out)[-1].folder)
        assert [checkpoint.step for checkpoint in checkpoints(out)] == [2]
        assert train(out, *these) == 0
        assert_same_numbers(out, *alone(model))
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "word", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("word")


def test_experts_in_bf16_are_evenly_used(train, tmp_path):
    assert train(tmp_path, *words("experts", "train.dtype=bf16", "sample.max_tokens=4")) == 0
    balance = [value for key, _, value in numbers(tmp_path) if key == "balance_loss"]
    # 1 is perfectly even; all tokens on 2 of 4 experts would be near 2.
    assert len(balance) == 4
    assert all(0.9 < value < 1.5 for value in balance)
