"""A run that is saved by some ranks goes on, to the last bit but rounding, on others."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fsdp_support.trainings import Block, SmallModel, train_and_save
from pcomm.core.errors import ConfigError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import RankPool, ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.checkpoint import load_checkpoint, model_shard_views, save_checkpoint
from pcomm.fsdp.settings import ReshardPolicy, Roles


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, ReshardPolicy.zero3(), 2), (3, ReshardPolicy.zero3(), 1)),
        ((3, ReshardPolicy.zero1(), 1), (1, ReshardPolicy.zero3(), 1)),
        ((1, ReshardPolicy.zero3(), 1), (2, ReshardPolicy.zero2(), 2)),
    ],
    ids=str,
)
def test_other_ranks_go_on(
    before: tuple[int, ReshardPolicy, int],
    after: tuple[int, ReshardPolicy, int],
    tmp_path: Path,
    rank_pool: RankPool,
) -> None:
    folder = tmp_path / "saved"
    for (size, shard, replicas), steps in ((before, range(2)), (after, range(2, 4))):
        arguments = size, shard, folder, steps, replicas
        if size == 1:
            found = train_and_save(*arguments)
        else:
            found = rank_pool.run(train_and_save, size, *arguments)[0]
    torch.manual_seed(0)
    model = SmallModel(is_tied=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model.loss(torch.randint(7, (12, 5), generator=generator)).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_a_checkpoint_of_another_model(rank: int, tmp_path: Path) -> None:
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        saved = fully_shard(SmallModel(), roles, units=[Block])
        save_checkpoint(tmp_path / "saved", model_shard_views(saved), groups["dp"])
        other = fully_shard(SmallModel(dim=6), roles, units=[Block])
        with pytest.raises(ConfigError, match=r"shape \(5, 16\) under that name"):
            load_checkpoint(tmp_path / "saved", model_shard_views(other), groups["dp"])


class Malice:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.makedirs, (str(self.folder), 0o777, True)


@ranks(2)
def test_an_index_that_would_run_a_program(rank: int, tmp_path: Path) -> None:
    saved, trap = tmp_path / "saved", tmp_path / "trap"
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        sharded = fully_shard(SmallModel(), Roles(groups["dp"], groups["dp"]), units=[Block])
        save_checkpoint(saved, model_shard_views(sharded), groups["dp"])
        if rank == 0:
            index = pickle.loads((saved / ".metadata").read_bytes())
            index.planner_data = Malice(trap)
            (saved / ".metadata").write_bytes(pickle.dumps(index))
            # It is a real one: torch's own reader runs it.
            FileSystemReader(saved).read_metadata()
            trap.rmdir()
        groups["dp"].collectives.all_reduce(torch.zeros(1))
        with pytest.raises(ConfigError, match=r"it names \S*makedirs, which is not part"):
            load_checkpoint(saved, model_shard_views(sharded), groups["dp"])
        assert not trap.exists()


@ranks(3)
def test_buffers_of_one_rank_are_saved_together(rank: int, tmp_path: Path) -> None:
    """Not the mean of one rank and the variance of another: ranks saw other batches."""
    with open_groups(Topology({"dp": 3}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        model = nn.Sequential(nn.BatchNorm1d(64, affine=False), nn.Linear(64, 6))
        sharded = fully_shard(model, roles, units=[nn.Linear])
        model(torch.randn(9, 64, generator=torch.Generator().manual_seed(rank)))
        save_checkpoint(tmp_path / "saved", model_shard_views(sharded), groups["dp"])
        model(torch.randn(9, 64))
        load_checkpoint(
            tmp_path / "saved", model_shard_views(sharded), groups["dp"], sharded=sharded
        )
    first = nn.BatchNorm1d(64, affine=False)
    first(torch.randn(9, 64, generator=torch.Generator().manual_seed(0)))
    for name, expected in first.named_buffers():
        assert torch.equal(getattr(model[0], name), expected), name
