"""First values for a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.plan.units import Member
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.local_group import LocalGroup

__all__ = ["materialise"]


def materialise(
    model: nn.Module,
    groups: Sequence[FlatGroup | LocalGroup],
    members: Sequence[Sequence[Member]],
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
) -> None:
    """Initialise what is on the meta device, module by module, and keep this rank's part. Local.

    A module's parameters are whole only while it is initialised, so the model never is.

    Raises:
        ConfigError: A module with parameters on meta that nobody initialises.
    """
    places = {
        (module, name): (group, index)
        for group in groups
        for index, own in enumerate(group.owners)
        for module, name in own
        if group.is_on_meta[index]
    }
    tied: dict[tuple[int, int], nn.Parameter] = {}
    for module in model.modules():
        own = {
            name: places[module, name] for name in module._parameters if (module, name) in places
        }
        meta_buffers = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if not own and not meta_buffers:
            continue
        for name in meta_buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.empty_like(buffer, device=device)
        for name, (group, index) in own.items():
            key = id(group), index
            whole = tied.get(key)
            if whole is None:
                shape = group.plan.layout.shapes[index]
                whole = nn.Parameter(
                    torch.empty(shape, dtype=group.plan.main_dtype, device=device),
                    requires_grad=group.plan.is_trainable,
                )
                if len(group.owners[index]) > 1:
                    tied[key] = whole
            module._parameters[name] = whole
        _initialise(module, initialise)
        for name, (group, index) in own.items():
            whole = module._parameters[name]
            assert whole is not None
            group.load(index, whole)
            module._parameters[name] = group.parts[index]


def _initialise(module: nn.Module, initialise: Callable[[nn.Module], None] | None) -> None:
    if initialise is not None:
        initialise(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"fully_shard: a {type(module).__name__} on the meta device",
            found="no method reset_parameters",
            why="A module on meta has shapes and no values.",
            fix="Pass initialise=, which is called with each such module.",
        )
    reset()
