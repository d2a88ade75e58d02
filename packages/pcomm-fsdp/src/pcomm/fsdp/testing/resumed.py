"""A training run that begins, or goes on from a checkpoint, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.groups.groups import open_groups
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings.policy import CommPolicy
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles
from pcomm.fsdp.state.checkpoint import (
    load_checkpoint,
    model_shard_views,
    optimizer_shard_views,
    save_checkpoint,
)
from pcomm.fsdp.testing.small_models import Block, SmallModel

__all__ = ["train_and_save"]

# Divides by 1, 2, 3 and 4 ranks.
_BATCH = 12


def train_and_save(
    size: int, reshard: ReshardPolicy, folder: Path, steps: range, replicas: int = 1
) -> dict[str, Tensor]:
    """Train some steps, from a checkpoint if they begin in the middle, and save.

    Collective over the world, which has `size` ranks; alone, there need not be one.

    Args:
        size: Number of ranks.
        reshard: Time until which parameters and gradients stay unsharded.
        folder: Folder of the checkpoint.
        steps: Numbers of the steps, from 0.
        replicas: Number of ranks that hold the same shard.

    Returns:
        The whole parameters afterwards.
    """
    rank = dist.get_rank() if size > 1 else 0
    topology = Topology({"rep": replicas, "dp": size // replicas}, order=("dp", "rep"))
    torch.manual_seed(steps.start)
    model = SmallModel(is_tied=True).double()
    with open_groups(topology, ["dp", ("dp", "reduce"), "rep", "rep_dp"]) as groups:
        sharded = fully_shard(
            model,
            Roles(groups["dp"], groups["dp", "reduce"], groups["rep"]),
            units=[Block],
            reshard=reshard,
            # Rows are cut on three ranks.
            comm=CommPolicy(max_padding=0.0 if size == 3 else 0.1),
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        views = model_shard_views(sharded) | optimizer_shard_views(sharded, optimizer)
        if steps.start:
            load_checkpoint(folder, views, groups["rep_dp"], sharded=sharded)
        for step in steps:
            sharded.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(7, (_BATCH, 5), generator=generator)
            model.loss(batch.chunk(size)[rank]).backward()
            optimizer.step()
        save_checkpoint(folder, views, groups["rep_dp"])
        return sharded.full_state_dict()
