"""A loss or gradient that is not a number: no rank uses it, and good checkpoints stay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from integration_support.short_runs import open_trainer, prepare_words, run_words, tiny_config
from pcomm.core import connect
from pcomm.core.testing import ranks
from pcomm.integration.checkpoint.folders import checkpoints, newest
from pcomm.integration.checkpoint.saver import NotFiniteError, is_finite
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.train.run import Outcome
from pcomm.integration.train.trainer import Trainer

EXPERTS = {"experts": 4, "balance_loss": 0.01}
LAYOUTS = {
    "dp": (ParallelConfig(dp=2), None, "blocks.1.mlp_norm.weight"),
    "tp": (ParallelConfig(tp=2), None, "blocks.1.mixer.qkv.weight"),
    "cp": (ParallelConfig(cp=2), None, "norm.weight"),
    "shards": (ParallelConfig(dp=2, data="shard"), None, "blocks.1.mlp.down.weight"),
    "experts": (ParallelConfig(dp=2, ep=2), EXPERTS, "blocks.1.mlp.experts"),
    "experts, shards": (ParallelConfig(dp=2, ep=2, data="shard"), EXPERTS, "blocks.1.mlp.experts"),
}


def config(layout: str) -> Config:
    parallel, model, _ = LAYOUTS[layout]
    return tiny_config(parallel, model=model)


@contextmanager
def nan_in(*steps: int, rank: int) -> Iterator[None]:
    """Losses of one rank are NaN in some steps, which are counted from 0."""
    step, token_losses = Trainer.step, LanguageModel.token_losses
    bad = False

    def watched(trainer: Trainer, index: int, **options: bool) -> object:
        nonlocal bad
        with connect() as world:
            bad = index in steps and world.rank == rank
        return step(trainer, index, **options)

    def losses(*arguments: object) -> torch.Tensor:
        found = token_losses(*arguments)
        return found * math.nan if bad and torch.is_grad_enabled() else found

    with (
        patch.object(Trainer, "step", watched),
        patch.object(LanguageModel, "token_losses", losses),
    ):
        yield


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.replicas.sharded.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(2)
def test_what_one_rank_has_stops_the_update_of_all(rank, layout, run_dir):
    name = LAYOUTS[layout][2]
    with open_trainer(config(layout), run_dir, torch.float32) as trainer:
        assert trainer.step(0).is_finite
        found = dict(trainer.model.named_parameters())
        [full, *_] = [full for full in found if full.startswith(name)]
        with torch.no_grad():
            if rank == 1:
                found[full].fill_(math.nan)
        trainer.replicas.sharded.parameters_changed()
        before = weights(trainer)
        result = trainer.step(1)
        assert not result.is_finite
        assert trainer.first_not_finite() == f"the parameter {full} on rank 1"
        after = weights(trainer)
    pairs = zip(before, after, strict=True)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(2)
def test_a_skipped_step_leaves_no_trace_and_its_gradient_is_named(rank, layout, run_dir):
    """The oracle is the same run, which never heard of that step."""
    left, culprit = [], None
    for indices in ((0, 1, 2), (0, 2)):
        with nan_in(1, rank=1), open_trainer(config(layout), run_dir, torch.float32) as trainer:
            for index in indices:
                is_finite_there = trainer.step(index).is_finite
                assert is_finite_there == (index != 1)
                if not is_finite_there:
                    culprit = trainer.first_not_finite()
            left.append({name: r.clone().tensor for name, r in trainer.shard_views().items()})
    # What backward meets first: the head is at the end of the forward pass.
    assert culprit is not None
    assert culprit.startswith("the gradient of head.weight on rank ")
    assert all(torch.equal(value, left[1][name]) for name, value in left[0].items())


@ranks(2)
def test_a_gradient_is_named_as_backward_meets_it(rank, run_dir):
    # Split layers, whose parameters are no shards: those refuse hooks of others.
    with open_trainer(config("tp"), run_dir, torch.float32) as trainer:
        parameters = dict(trainer.model.named_parameters())
        # Gradients that overflow in the last block, as well as what backward reaches after it.
        for name in ("embedding.weight", "blocks.1.mixer.qkv.weight", "blocks.0.mlp.down.weight"):
            parameters[name].register_hook(lambda gradient: gradient * math.inf)
        result = trainer.step(0)
        assert not result.is_finite
        assert math.isfinite(result.row["loss"])
        culprit = trainer.first_not_finite()
    assert culprit == "the gradient of blocks.1.mixer.qkv.weight on rank 0"


def test_numbers_whose_sum_overflows_are_finite():
    assert is_finite(torch.tensor([3e38, 3e38]))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert not is_finite(torch.tensor([1.0, math.nan]))
    assert is_finite(torch.empty(0))


# -- whole runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{prepare_words(tmp_path_factory.mktemp('text'))}/text/*.txt"


def train(text: str, run_dir: Path, *overrides: str) -> Outcome:
    return run_words(text, run_dir, "train.steps=6", *overrides)


def rows(run_dir: Path) -> list[dict[str, float]]:
    parsed = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in parsed if "loss" in row]


@ranks(2)
def test_a_run_stops_and_names_the_last_good_checkpoint(rank, text, tmp_path):
    run = tmp_path / "run"
    expected = rf"train: step 5: loss nan, .*rank \d\n.*\n.*last good checkpoint, {run}.* step 4;"
    with nan_in(4, rank=1), pytest.raises(NotFiniteError, match=expected):
        train(text, run)
    assert [checkpoint.step for checkpoint in checkpoints(run)] == [2, 4]
    # As the message says: what was only chance is gone in the next attempt.
    assert train(text, run).steps == 6


def test_skipped_steps_are_counted_over_starts(text, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    keys = ["train.on_nan=skip", "train.schedule=constant", "train.eval_every=none"]
    with nan_in(1, rank=0):
        train(text, whole, *keys, "train.steps=4")
        train(text, halves, *keys, "train.steps=2")
        train(text, halves, *keys, "train.steps=4")
    assert [row.get("skipped") for row in rows(whole)] == [None, 1, None, None]
    assert rows(whole)[1]["loss"] is None
    assert newest(whole).state()["skipped"] == 1
    # A resumed optimizer has seen as many updates as one that went on: bit for bit the same.
    key = [[row["loss"], row["grad_norm"]] for row in rows(whole)]
    assert [[row["loss"], row["grad_norm"]] for row in rows(halves)] == key


def test_too_many_skipped_steps_end_the_run(text, tmp_path):
    options = ["train.on_nan=skip", "train.skip_limit=2"]
    with nan_in(1, 3, 4, rank=0), pytest.raises(NotFiniteError, match="step 5: 2 skipped steps"):
        train(text, tmp_path, *options)


def test_weights_that_are_not_finite_replace_no_checkpoint(text, tmp_path):
    """The update of the last step overflows: its loss and its gradient were fine."""
    train(text, tmp_path, "checkpoint.keep=1", "train.steps=4")
    options = ["checkpoint.keep=1", "train.learning_rate=1e38", "train.weight_decay=100"]
    with pytest.raises(NotFiniteError, match=r"infinity in model\..*\n.*\n.*step-00000004"):
        train(text, tmp_path, *options, "train.steps=5", "train.eval_tokens=1")
    [kept] = checkpoints(tmp_path)
    assert kept.step == 4
