"""Everything in a run that a checkpoint holds, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm import fsdp
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.fsdp import Sharded
from pcomm.ntp import Plan
from pcomm.ntp.reshard import shard_views, state_tensors

__all__ = [
    "model_shard_views",
    "planned_shard_views",
    "set_optimizer_step",
    "training_shard_views",
]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def model_shard_views(
    model: nn.Module, ranks: Mapping[str, int] | None = None
) -> dict[str, ShardView]:
    """The parameters of a model that is not sharded over replicas. Local.

    Args:
        model: The model, or this rank's part of it under tensor parallelism.
        ranks: Rank of this process by the scope of `ParamLayout`; None where one rank has all.
    """
    layouts, ranks = param_layouts_of(model), ranks or {}
    return {
        f"model.{name}": ShardView(parameter.detach(), own, ranks.get(own.scope, 0))
        for name, parameter in model.named_parameters()
        for own in (layouts[name],)
    }


def training_shard_views(
    sharded: Sharded,
    optimizer: Optimizer,
    layouts: Mapping[str, ParamLayout],
    ranks: Mapping[str, int],
) -> dict[str, ShardView]:
    """This rank's part of a model in training: parameters, and AdamW's two averages of each. Local.

    Averages that do not exist yet are made, as zeros, with a step count of zero; so the same
    call serves to save and to load.

    Args:
        sharded: The model.
        optimizer: AdamW of its parameters.
        layouts: `ParamLayout` of each parameter, by name.
        ranks: Rank of this process by the scope of `ParamLayout`.
    """
    _make_moments(optimizer, sharded.parameters())
    views = fsdp.model_shard_views(sharded, param_layouts=layouts, ranks=ranks)
    return views | fsdp.optimizer_shard_views(
        sharded, optimizer, keys=_MOMENTS, param_layouts=layouts, ranks=ranks
    )


def planned_shard_views(
    model: nn.Module, optimizer: Optimizer, plan: Plan, rank: int
) -> dict[str, ShardView]:
    """The same of a replica whose degree is its own, under the same names. Local.

    Replicas are cut at different places and hold the same numbers, so one of them is saved, and
    all of them read.

    Args:
        model: The model.
        optimizer: AdamW of its parameters.
        plan: The plan of the job.
        rank: Global rank of this process.
    """
    _make_moments(optimizer, model.parameters())
    tensors = state_tensors(model, optimizer)
    return shard_views(plan, rank, tensors, param_layouts_of(model))


def _make_moments(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make AdamW's averages where there are none yet: zeros, and a step count of zero. Local.

    That is what its first step begins with, so nothing changes.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)


def set_optimizer_step(optimizer: Optimizer, step: int) -> None:
    """Tell AdamW how many steps its averages have seen. Local."""
    for state in optimizer.state.values():
        counted: Tensor = state["step"]
        counted.fill_(float(step))
