"""The groups, models, batches and steps that tests of sharded training share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor, nn

from pcomm.core.groups.groups import Groups, open_groups
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.plan.units import Units
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles
from pcomm.fsdp.sharded import Sharded
from pcomm.fsdp.testing.small_models import Block, SmallModel

__all__ = [
    "MICRO_BATCHES",
    "STAGES",
    "STEPS",
    "STRATEGIES",
    "TOKENS",
    "ZERO",
    "accumulated_step",
    "check_state",
    "flat_groups",
    "model_of",
    "open_two",
    "roles_of",
    "shard",
    "step_of",
    "step_on_tokens",
    "throw",
    "tokens",
    "train_one_process",
]

STRATEGIES = {
    "zero3": ReshardPolicy.zero3(),
    "zero3, reduced once": ReshardPolicy.zero3(reduce="step"),
    "kept for backward": ReshardPolicy(keep="backward"),
    "zero2": ReshardPolicy.zero2(),
    "zero1": ReshardPolicy.zero1(),
}
"""Reshard policies by name."""

ZERO = ("zero3", "zero2", "zero1")
"""Names of the three stages of ZeRO."""

STAGES = ("zero3", "zero3, reduced once", "zero2", "zero1")
"""Those, and ZeRO-3 with one reduce a step."""

STEPS, MICRO_BATCHES = 3, 2

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])
"""A batch for a `SmallModel`, the same on all ranks."""


def open_two(size: int = 2) -> Groups:
    """Groups `dp[gather]` and `dp[reduce]` over all ranks. Collective.

    Args:
        size: Number of ranks.
    """
    return open_groups(Topology({"dp": size}), [("dp", "gather"), ("dp", "reduce")])


def roles_of(groups: Groups) -> Roles:
    """The roles of the groups of `open_two`. Local."""
    return Roles(groups["dp", "gather"], groups["dp", "reduce"])


def shard(
    model: nn.Module, groups: Groups, *, units: Units = (Block,), **options: object
) -> Sharded:
    """`fully_shard` over the groups of `open_two`. Collective.

    Args:
        model: The model.
        groups: The groups.
        units: The units.
        options: Further arguments of `fully_shard`.
    """
    return fully_shard(model, roles_of(groups), units=units, **options)  # type: ignore[arg-type]


def flat_groups(sharded: Sharded) -> list[FlatGroup]:
    """The parameter groups that communicate or convert, in the order of the units. Local."""
    return list(sharded._engine.groups.values())


def model_of(dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: object) -> SmallModel:
    """A `SmallModel`, the same for equal arguments. Local.

    Args:
        dtype: Dtype of its parameters.
        seed: Seed of its parameters.
        options: Arguments of `SmallModel`.
    """
    torch.manual_seed(seed)
    return SmallModel(**options).to(dtype)  # type: ignore[arg-type]


def tokens(step: int, micro: int, rank: int) -> Tensor:
    """The batch `[2, 6]` of one rank in a micro-batch of a step. Local."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(7, (2, 6), generator=generator)


def step_of(model: SmallModel, sharded: Sharded, step: int, rank: int) -> None:
    """Forward and backward of each micro-batch of a step. Collective."""
    for micro in range(MICRO_BATCHES):
        with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
            model.loss(tokens(step, micro, rank)).backward()


def step_on_tokens(model: SmallModel, sharded: Sharded) -> float:
    """Forward and backward of `TOKENS` in a step of one micro-batch; the loss. Collective."""
    sharded.zero_grad()
    loss = model.loss(TOKENS)
    loss.backward()
    return loss.item()


def accumulated_step(model: SmallModel, sharded: Sharded) -> None:
    """Forward and backward of `TOKENS` in each micro-batch of a step. Collective."""
    sharded.zero_grad()
    for micro in range(MICRO_BATCHES):
        with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
            model.loss(TOKENS).backward()


def throw(*_: object) -> NoReturn:
    """The mistake of a user's model. Local.

    Raises:
        ArithmeticError: Always.
    """
    raise ArithmeticError("a bad batch")


def train_one_process(model: SmallModel, batches: Iterable[int]) -> None:
    """Train on the batches of some ranks, in this process and without sharding. Local."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.03)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            losses = [model.loss(tokens(step, micro, rank)) for rank in batches]
            torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()


def check_state(state: dict[str, Tensor], expected: nn.Module) -> None:
    """Compare a full state dict with that of a model, in fp64. Local.

    Raises:
        AssertionError: They differ.
    """
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)
