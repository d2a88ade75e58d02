"""A sharded model's state as that of an unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, near_misses
from pcomm.fsdp.flat_group import FlatGroup
from pcomm.fsdp.local_group import LocalGroup

__all__ = ["load_whole", "whole_state"]


def whole_state(
    model: nn.Module,
    groups: Sequence[FlatGroup | LocalGroup],
    names: Mapping[str, str],
    device: torch.device | None,
) -> dict[str, Tensor]:
    """Every parameter and buffer, whole. Collective over the gather groups."""
    whole: dict[str, Tensor] = {}
    for group in groups:
        for name, value in group.whole_values():
            whole[name] = value.clone() if device is None else value.to(device, copy=True)
    # The order and the choice of names are the model's own.
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        state[name] = whole[names[name]] if name in names else value.clone()
    return state


def load_whole(
    model: nn.Module,
    groups: Sequence[FlatGroup | LocalGroup],
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
) -> None:
    """Take this rank's part of every parameter, and every buffer. Local."""
    buffers = {name: x for name, x in model.state_dict().items() if name not in names}
    firsts = set(names.values())
    shapes = {
        name: shape
        for group in groups
        for name, shape in zip(group.plan.names, group.plan.layout.shapes, strict=True)
    }
    known = firsts | buffers.keys()
    missing = sorted(known - state.keys())
    extra = sorted(state.keys() - names.keys() - buffers.keys())
    if missing or extra:
        raise ConfigError(
            "load_full_state_dict",
            found=f"missing {missing[:4]}, unknown {extra[:4]}",
            why="The state dict holds exactly the parameters and buffers of the model.",
            fix=near_misses((extra or missing)[0], known),
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != tuple(shape):
            raise ConfigError(
                f"load_full_state_dict: {name!r} of shape {tuple(shape)}",
                found=f"shape {tuple(state[name].shape)}",
                why="The whole parameter is loaded, and each rank takes its part.",
                fix="Pass an unsharded state dict of the same model.",
            )
    with torch.no_grad():
        for group in groups:
            for index, name in enumerate(group.plan.names):
                group.load(index, state[name])
        for name, buffer in buffers.items():
            buffer.copy_(state[name])
