"""Everything in a run that a checkpoint holds, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of

__all__ = [
    "MOMENTS",
    "make_moments",
    "model_shard_views",
    "optimizer_shard_views",
    "set_optimizer_step",
]

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_shard_views(
    model: nn.Module, ranks: Mapping[str, int] | None = None
) -> dict[str, ShardView]:
    """The parameters of `model`, as this rank holds them. Local.

    Args:
        model: This rank's part.
        ranks: This rank's place by the scope of `ParamLayout`; without it, one rank has everything.
    """
    placements = param_layouts_of(model)
    return {
        f"model.{name}": _region(parameter.detach(), placements[name], ranks)
        for name, parameter in model.named_parameters()
    }


def optimizer_shard_views(
    optimizer: Optimizer, model: nn.Module, ranks: Mapping[str, int] | None = None
) -> dict[str, ShardView]:
    """AdamW's two averages of every parameter, spread as the parameter is. Local.

    Averages that do not exist yet are made, as zeros, with a step count of zero; so the same
    call serves to save and to load.

    Args:
        optimizer: Of the parameters of `model`.
        model: This rank's part.
        ranks: See `model_shard_views`.
    """
    placements = param_layouts_of(model)
    regions: dict[str, ShardView] = {}
    make_moments(optimizer, model.parameters())
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            region = _region(optimizer.state[parameter][moment], placements[name], ranks)
            regions[f"optimizer.{moment}.{name}"] = region
    return regions


def make_moments(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make AdamW's averages where there are none yet: zeros, and a step count of zero. Local.

    That is what its first step begins with, so nothing changes.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)


def set_optimizer_step(optimizer: Optimizer, step: int) -> None:
    """Tell AdamW how many steps its averages have seen. Local."""
    for state in optimizer.state.values():
        counted: Tensor = state["step"]
        counted.fill_(float(step))


def _region(tensor: Tensor, placement: ParamLayout, ranks: Mapping[str, int] | None) -> ShardView:
    return ShardView(tensor, placement, (ranks or {}).get(placement.scope, 0))
