"""Checkpoints: the same tensors on any ranks, and a run that goes on as if it had not stopped."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from integration_support.short_runs import open_trainer, prepare_words, tiny_config
from pcomm.core import Collectives
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import join_shards
from pcomm.core.testing import RankPool, ranks
from pcomm.integration.checkpoint.folders import checkpoints, newest
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.parallelize import ALL_RANKS

ALONE = ParallelConfig()
ON_TWO = {
    "dp2": ParallelConfig(dp=2),
    "tp2": ParallelConfig(tp=2),
    "tp2+sequence": ParallelConfig(tp=2, sequence=True),
}
# The second replica is whole, and saves for both; the first one has one rank of two.
UNEVEN = ParallelConfig(dp=2, tp=2, failed=("dp=0,tp=0",))
Result = dict[str, list[float] | dict[str, Tensor]]


def config(parallel: ParallelConfig) -> Config:
    return tiny_config(parallel, model={"qk_norm": True}, steps=6, learning_rate=1e-2)


def train(parallel: ParallelConfig, folder: Path, data: Path, until: int, dtype: str) -> None:
    """Go on from the newest checkpoint in `folder` until a step, and save there.

    Leaves `result.pt` with the losses of these steps and the whole tensors after them.
    """
    with open_trainer(config(parallel), data, getattr(torch, dtype)) as trainer:
        group = trainer.groups[ALL_RANKS, "checkpoint"]
        start = newest(folder)
        if start is not None:
            read(start, trainer.shard_views(), group)
            trainer.resume_at(start.step)
        first = start.step if start else 0
        losses = [trainer.step(index).row["loss"] for index in range(first, until)]
        with Saver(folder, group, keep=None, is_asynchronous=True) as saver:
            saver.save(until, trainer.shard_views(), {})
        tensors = whole(trainer.shard_views(), trainer.groups["tp"].collectives)
        if group.rank == 0:
            torch.save({"losses": losses, "tensors": tensors}, folder / "result.pt")


@ranks(2)
def train_on_two(
    rank: int, parallel: ParallelConfig, folder: Path, data: Path, until: int, dtype: str
) -> None:
    train(parallel, folder, data, until, dtype)


@ranks(3)
def train_on_three(
    rank: int, parallel: ParallelConfig, folder: Path, data: Path, until: int, dtype: str
) -> None:
    train(parallel, folder, data, until, dtype)


def whole(views: dict[str, ShardView], tp: Collectives) -> dict[str, Tensor]:
    """The logical tensors, put together from all ranks without the code of checkpoints."""
    joined = {}
    for name, view in views.items():
        layout, dim = view.param_layout.layout, view.param_layout.dim
        tensor = view.tensor
        if layout is not None and layout.size > 1:
            shards = tp.all_gather(tensor.contiguous(), dim=dim).split(list(layout.sizes), dim)
            tensor = join_shards(shards, layout, dim=dim)
        joined[name] = tensor.clone()
    return joined


def train_on(
    pool: RankPool,
    parallel: ParallelConfig,
    folder: Path,
    data: Path,
    *,
    until: int,
    dtype: str = "float32",
) -> Result:
    if parallel == ALONE:
        train(parallel, folder, data, until, dtype)
    else:
        train_there = train_on_three if parallel.failed else train_on_two
        train_there(
            rank_pool=pool, parallel=parallel, folder=folder, data=data, until=until, dtype=dtype
        )
    result: Result = torch.load(folder / "result.pt")
    return result


def assert_same_tensors(mine: Result, other: Result) -> None:
    assert mine["tensors"].keys() == other["tensors"].keys()
    for name, tensor in mine["tensors"].items():
        assert torch.equal(tensor, other["tensors"][name]), name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("data"), documents=40)


def test_tensors_pass_through_any_ranks(rank_pool, data, tmp_path):
    """Each stage reads what the one before has written, and writes it again."""
    first = train_on(rank_pool, ON_TWO["tp2"], tmp_path, data, until=3)
    averages = {n: t for n, t in first["tensors"].items() if n.startswith("optimizer.")}
    assert len(averages) == 2 / 3 * len(first["tensors"])
    assert all(tensor.any() for tensor in averages.values())
    for parallel in (UNEVEN, ON_TWO["dp2"], ALONE):
        stage = train_on(rank_pool, parallel, tmp_path, data, until=3)
        assert stage["losses"] == []
        assert_same_tensors(stage, first)


def assert_fused_weights_in_pieces(saved: Mapping[str, Any]) -> None:
    """On two ranks: each one's heads of queries, keys and values are pieces of their own."""
    # 4 heads of 8 for queries, 2 for keys, 2 for values; 64 gates and 64 ups.
    for name, offsets in {
        "model.blocks.0.mixer.qkv.weight": [0, 16, 32, 40, 48, 56],
        "optimizer.exp_avg.blocks.1.mlp.gate_up.weight": [0, 32, 64, 96],
    }.items():
        assert sorted(chunk.offsets[0] for chunk in saved[name].chunks) == offsets, name


@pytest.mark.parametrize("name", ["dp2", "tp2+sequence"])
def test_what_both_ranks_hold_is_written_once(rank_pool, data, tmp_path, name):
    parallel = ON_TWO[name]
    train_on(rank_pool, parallel, tmp_path, data, until=1)
    folder = checkpoints(tmp_path)[0].folder
    metadata = index(tmp_path)
    if parallel.tp == 2:
        assert_fused_weights_in_pieces(metadata.state_dict_metadata)
    for name, saved in metadata.state_dict_metadata.items():
        elements = sum(chunk.sizes.numel() for chunk in saved.chunks)
        assert elements == saved.size.numel(), name
    # A piece written by both would leave bytes in a file that the index does not know.
    known: Counter[str] = Counter()
    for piece in metadata.storage_data.values():
        known[piece.relative_path] += piece.length
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.distcp")}
    assert known == sizes
    assert len(sizes) == 2
    # Both ranks write, and neither does nearly all of it.
    assert min(sizes.values()) > 0.25 * max(sizes.values())


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ALONE, id="alone", marks=pytest.mark.soak),
        pytest.param(ON_TWO["dp2"], id="dp2"),
        pytest.param(ON_TWO["tp2"], id="tp2", marks=pytest.mark.soak),
        pytest.param(ON_TWO["tp2+sequence"], id="tp2+sequence"),
    ],
)
def test_resuming_on_the_same_ranks_changes_no_bit(rank_pool, data, tmp_path, parallel):
    through = train_on(rank_pool, parallel, tmp_path / "through", data, until=4)
    before = train_on(rank_pool, parallel, tmp_path / "stopped", data, until=2)
    after = train_on(rank_pool, parallel, tmp_path / "stopped", data, until=4)
    assert before["losses"] + after["losses"] == through["losses"]
    assert_same_tensors(after, through)
    assert through["losses"][-1] < through["losses"][0] - 0.3


def test_resuming_on_other_ranks_gives_the_same_losses(rank_pool, data, tmp_path):
    """TP 2, one process, TP 1 beside TP 2, DP 2; in fp64 only rounding of 1e-16 is left."""
    through = train_on(rank_pool, ALONE, tmp_path / "a", data, until=4, dtype="float64")
    moving: list[float] = []
    for parallel, until in ((ON_TWO["tp2"], 1), (ALONE, 2), (UNEVEN, 3), (ON_TWO["dp2"], 4)):
        stage = train_on(rank_pool, parallel, tmp_path / "b", data, until=until, dtype="float64")
        moving += stage["losses"]
    worst = max(abs(a - b) for a, b in zip(moving, through["losses"], strict=True))
    assert worst < 1e-10


def index(run_dir: Path) -> Metadata:
    metadata: Metadata = pickle.loads((checkpoints(run_dir)[0].folder / ".metadata").read_bytes())
    return metadata
