"""Everything in a run that a checkpoint holds, by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.placement import placements_of
from pcomm.integration.checkpoint.region import Region

__all__ = ["model_regions", "optimizer_regions", "set_optimizer_step"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def model_regions(model: nn.Module, *, rank: int) -> dict[str, Region]:
    """The parameters of `model`, as this rank of the tensor-parallel group holds them. Local."""
    placements = placements_of(model)
    return {
        f"model.{name}": Region(parameter.detach(), placements[name], rank)
        for name, parameter in model.named_parameters()
    }


def optimizer_regions(optimizer: Optimizer, model: nn.Module, *, rank: int) -> dict[str, Region]:
    """AdamW's two averages of every parameter, spread as the parameter is. Local.

    Averages that do not exist yet are made, as zeros, with a step count of zero; so the same
    call serves to save and to load.
    """
    placements = placements_of(model)
    regions: dict[str, Region] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        for moment in _MOMENTS:
            regions[f"optimizer.{moment}.{name}"] = Region(state[moment], placements[name], rank)
    return regions


def set_optimizer_step(optimizer: Optimizer, step: int) -> None:
    """Tell AdamW how many steps its averages have seen. Local."""
    for state in optimizer.state.values():
        counted: Tensor = state["step"]
        counted.fill_(float(step))
