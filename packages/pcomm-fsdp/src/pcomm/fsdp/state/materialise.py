"""First values for a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard

__all__ = ["materialise"]


def materialise(
    model: nn.Module,
    shards: Sequence[ParamShard | LocalParams],
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
) -> None:
    """Initialise what is on the meta device, module by module, and keep this rank's shard. Local.

    A module's parameters are whole only while it is initialised, so the model never is.

    Raises:
        ConfigError: A module with parameters on the meta device, and without an initialisation.
    """
    places = {
        (module, name): (shard, index)
        for shard in shards
        for index, own in enumerate(shard.owners)
        for module, name in own
        if shard.is_on_meta[index]
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
        for name, (shard, index) in own.items():
            key = id(shard), index
            whole = tied.get(key)
            if whole is None:
                shape = shard.plan.layout.shapes[index]
                whole = nn.Parameter(
                    torch.empty(shape, dtype=shard.plan.main_dtype, device=device),
                    requires_grad=shard.plan.is_trainable,
                )
                if len(shard.owners[index]) > 1:
                    tied[key] = whole
            module._parameters[name] = whole
        _initialise(module, initialise)
        for name, (shard, index) in own.items():
            whole = module._parameters[name]
            assert whole is not None
            shard.load(index, whole)
            module._parameters[name] = shard.parameters[index]


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
