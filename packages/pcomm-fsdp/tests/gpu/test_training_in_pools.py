"""Training in registered memory on one rank, whose groups have communicators all the same.

The case on NCCL has never run: no GPU was at hand. The same code runs on gloo and fake pools.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_support.trainings import on_gloo_and_nccl, one_rank_groups
from pcomm.core.groups.group import Group
from pcomm.core.memory.pool_backends import FakePools, NcclPools
from pcomm.core.memory.pools import PoolRegistry, State
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, Roles

LEARNING_RATE, STEPS = 0.1, 3


def model_of(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def inputs(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(device)


def unsharded(device: torch.device) -> dict[str, Tensor]:
    """The same arithmetic by hand: weights in fp32, computed with in fp64."""
    main = model_of(device)
    for step in range(STEPS):
        whole = copy.deepcopy(main).double()
        whole(inputs(step, device)).square().mean().backward()
        with torch.no_grad():
            for mine, computed in zip(main.parameters(), whole.parameters(), strict=True):
                assert computed.grad is not None
                mine.sub_(LEARNING_RATE * computed.grad.float())
    return main.state_dict()


@on_gloo_and_nccl
def test_both_roles_are_registered_and_training_is_that_of_one_process(
    tmp_path: Path, kind: str
) -> None:
    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    if kind == "nccl":
        torch.cuda.set_device(device)
    with one_rank_groups(kind, tmp_path) as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        backend = NcclPools(gather) if kind == "nccl" else FakePools()
        registry = PoolRegistry(groups, Group("dp", (0,), None, role="control"), backend)
        model = model_of(device)
        sharded = fully_shard(
            model,
            Roles(gather, reduce),
            units=[nn.Linear],
            precision=Precision(torch.float64),
            pools=registry,
        )
        bindings = registry.bindings
        assert [binding.group for binding in bindings] == ["dp[gather]", "dp[reduce]"]
        assert all(binding.state is State.BOUND for binding in bindings)
        segments = [backend.segments(binding.arena.pool) for binding in bindings]
        optimizer = torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE)
        for step in range(STEPS):
            sharded.zero_grad()
            model(inputs(step, device)).square().mean().backward()
            optimizer.step()
        found = sharded.full_state_dict()
        for name, value in unsharded(device).items():
            # fp32 weights after a few steps; gradients are computed in fp64.
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert [backend.segments(binding.arena.pool) for binding in bindings] == segments
        groups.close()
        assert [binding.state for binding in bindings] == [State.UNBOUND] * 2
