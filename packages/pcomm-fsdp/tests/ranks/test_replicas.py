"""HSDP: shards that several ranks hold have the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STAGES,
    STEPS,
    STRATEGIES,
    Block,
    check_state,
    model_of,
    step_of,
    tokens,
    train_one_process,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [*(((2, 2), one) for one in STAGES), ((4, 1), "zero2"), ((1, 4), "zero3, reduced once")],
    ids=str,
)
@ranks(4)
def test_replicas_of_shards(rank: int, sizes: tuple[int, int], strategy: str) -> None:
    """HSDP; with one shard it is plain data parallelism, with one replica plain sharding."""
    reference = model_of()
    train_one_process(reference, [0, 1, 2, 3])
    topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
    names = ["shard", ("shard", "reduce"), "rep"]
    with open_groups(topology, names) as groups:
        model = model_of()
        roles = Roles(groups["shard"], groups["shard", "reduce"], groups["rep"])
        sharded = fully_shard(model, roles, units=[Block], reshard=STRATEGIES[strategy])
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        for step in range(STEPS):
            sharded.zero_grad()
            step_of(model, sharded, step, rank)
            sharded.clip_grad_norm(0.3)
            optimizer.step()
        check_state(sharded.full_state_dict(), reference)


@ranks(2)
def test_every_backward_may_be_a_last_one(rank: int) -> None:
    """Two steps' gradients without zero_grad add up, with replicas too."""
    reference = model_of()
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            (sum(reference.loss(tokens(step, micro, r)) for r in (0, 1)) / 2).backward()
    for sizes in ((2, 1), (1, 2)):
        topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
        with open_groups(topology, ["shard", "rep"]) as groups:
            model = model_of()
            roles = Roles(groups["shard"], groups["shard"], groups["rep"])
            sharded = fully_shard(model, roles, units=[Block])
            for step in range(2):
                step_of(model, sharded, step, rank)
            expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            torch.testing.assert_close(sharded.grad_norm(), expected, rtol=1e-12, atol=0)
