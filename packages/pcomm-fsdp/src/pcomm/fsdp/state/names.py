"""Names in a model's state dict, and what each stands for: the one place that knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard

__all__ = ["ExtraState", "ModuleBuffer", "NameTable", "read_names", "unwrapped"]

_COMPILED = "_orig_mod."
_WRAPPED = "_checkpoint_wrapped_module."
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class ModuleBuffer:
    """A buffer by its place, where its module may put another tensor.

    Args:
        module: The module that holds it.
        name: Its name in the module.
    """

    module: nn.Module
    name: str

    def holder(self) -> MutableMapping[str, Any]:
        """The mapping that has it under `name`."""
        return self.module._buffers


class ExtraState(dict[str, Any]):
    """The result of a module's `get_extra_state`, as a mapping with the one key `"state"`.

    Args:
        module: A module with `get_extra_state` and `set_extra_state`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __call__(self) -> ExtraState:
        """The state as it is now."""
        found = ExtraState(self._module)
        dict.__setitem__(found, "state", self._module.get_extra_state())
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        """Give it to the module."""
        self._module.set_extra_state(value)


@dataclass(frozen=True)
class NameTable:
    """Names of a model's parameters, buffers and the rest of its state.

    A parameter is found in the state dict as the object that it is, whatever wrappers and hooks
    make of its name; so is a buffer.

    Args:
        parameters: Names in the state dict of each parameter, by its name in the model. Empty
            where a hook leaves it out.
        buffers: Buffers by name in the state dict.
        extras: Modules with `get_extra_state`, by the name of that state in the state dict.
        computed: Names in the state dict of tensors that are neither.
    """

    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, ModuleBuffer]
    extras: Mapping[str, nn.Module]
    computed: tuple[str, ...]

    def saved_name(self, parameter: str) -> str:
        """The name of a parameter in a checkpoint, without what wrappers add."""
        names = self.parameters[parameter]
        return unwrapped(names[0] if names else parameter)

    def check_saved_as_it_is(self, asked: str) -> None:
        """State is parameters, buffers and extra state, and nothing computed from them. Local.

        Raises:
            ConfigError: A hook makes other tensors, which a checkpoint of shards cannot hold.
        """
        if self.computed:
            raise ConfigError(
                asked,
                found=f"tensors that hooks of the state dict make: {list(self.computed[:4])}",
                why="They are computed from this rank's shards, not from the whole parameters.",
                fix="Save sharded.full_state_dict(), where hooks see whole parameters.",
            )


def unwrapped(name: str) -> str:
    """A name as it is without `torch.compile` and `checkpoint_wrapper`."""
    return name.replace(_COMPILED, "").replace(_WRAPPED, "")


def read_names(
    model: nn.Module,
    shards: Sequence[ParamShard | LocalParams],
    allowed: Callable[[], AbstractContextManager[None]],
) -> NameTable:
    """The table of a model as it is now. Local.

    Args:
        model: The sharded model.
        shards: The shards of all parameter groups.
        allowed: A context in which the model's state dict may be taken.
    """
    with allowed():
        state: dict[str, Any] = model.state_dict(keep_vars=True)
    first_names = {
        id(parameter): name
        for shard in shards
        for name, parameter in zip(shard.plan.names, shard.parameters, strict=True)
    }
    places = {
        id(buffer): ModuleBuffer(module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters: dict[str, list[str]] = {name: [] for name in first_names.values()}
    buffers: dict[str, ModuleBuffer] = {}
    extras: dict[str, nn.Module] = {}
    computed = []
    for name, value in state.items():
        if id(value) in first_names:
            parameters[first_names[id(value)]].append(name)
        elif id(value) in places:
            buffers[name] = places[id(value)]
        elif name.rpartition(".")[2] == _EXTRA and name.rpartition(".")[0] in modules:
            extras[name] = modules[name.rpartition(".")[0]]
        elif isinstance(value, Tensor):
            computed.append(name)
    found = {name: tuple(known) for name, known in parameters.items()}
    return NameTable(found, buffers, extras, tuple(computed))
