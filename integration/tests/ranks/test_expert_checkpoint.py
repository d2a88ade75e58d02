"""A checkpoint of experts on four ranks, read by one and by two that share them otherwise."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from integration_support.short_runs import open_trainer, tiny_config, train_steps, worst_difference
from pcomm.core.checkpoint import ShardView
from pcomm.core.testing import RankPool, ranks
from pcomm.integration.checkpoint.folders import checkpoints, newest
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.parallelize import ALL_RANKS

STEPS = 2


def config(parallel: ParallelConfig, *, seed: int = 0) -> Config:
    return tiny_config(parallel, model={"experts": 4, "shared_expert_width": 16}, seed=seed)


def read_back(parallel: ParallelConfig, folder: Path, run_dir: Path) -> dict[str, ShardView]:
    """This rank's part of the checkpoint, in a model that started from other weights."""
    with open_trainer(config(parallel, seed=1), run_dir, torch.float64) as trainer:
        checkpoint = newest(folder)
        assert checkpoint is not None
        views = trainer.shard_views()
        read(checkpoint, views, trainer.groups[ALL_RANKS, "checkpoint"])
        return {name: view.clone() for name, view in views.items()}


@ranks(4)
def save(rank: int, folder: Path, run_dir: Path) -> None:
    parallel = ParallelConfig(dp=2, tp=2, ep=4)
    with open_trainer(config(parallel), run_dir, torch.float64) as trainer:
        for index in range(STEPS):
            trainer.step(index)
        group = trainer.groups[ALL_RANKS, "checkpoint"]
        with Saver(folder, group, keep=None, is_asynchronous=True) as saver:
            saver.save(STEPS, trainer.shard_views(), {})


@pytest.fixture(scope="module")
def folder(rank_pool: RankPool, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by dp 2 x tp 2 whose four ranks share the experts."""
    folder = tmp_path_factory.mktemp("saved")
    save(rank_pool=rank_pool, folder=folder, run_dir=run_dir)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path, run_dir: Path) -> dict[str, Tensor]:
    """As one process reads it."""
    views = read_back(ParallelConfig(), folder, run_dir)
    return {name: view.tensor for name, view in views.items()}


def test_one_process_reads_what_it_would_have_trained(whole, run_dir):
    alone = train_steps(config(ParallelConfig()), run_dir, torch.float64, STEPS)
    worst, name = worst_difference(alone.views, whole)
    assert worst < 1e-9, name
    assert whole["model.blocks.1.mlp.experts.down"].shape == (4, 32, 64)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp=2, ep=2),
        ParallelConfig(dp=2),
        ParallelConfig(tp=2, ep=2),
        ParallelConfig(tp=2, sequence=True),
    ],
    ids=["dp2 ep2", "dp2", "tp2 ep2", "tp2+sequence"],
)
@ranks(2)
def test_two_ranks_read_their_parts(rank, parallel, folder, run_dir, whole):
    views = read_back(parallel, folder, run_dir)
    worst, name = worst_difference(views, whole)
    assert worst == 0, name


def test_every_expert_is_written_once(folder):
    metadata = pickle.loads((checkpoints(folder)[0].folder / ".metadata").read_bytes())
    for name in (
        "model.blocks.0.mlp.experts.gate_up",
        "optimizer.exp_avg.blocks.1.mlp.experts.down",
    ):
        saved = metadata.state_dict_metadata[name]
        assert sorted(chunk.offsets[0] for chunk in saved.chunks) == [0, 1, 2, 3]
        assert sum(chunk.sizes.numel() for chunk in saved.chunks) == saved.size.numel()
