"""A model's state by the names of its state dict: first values, whole to shards, shards to whole.

The model itself says what its state is: it gets whole parameters for as long as its own
`state_dict` or `load_state_dict` runs, with all wrappers and hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, near_misses
from pcomm.fsdp.plan.units import Owner
from pcomm.fsdp.runtime.shards import LocalParams, ParamShard, install

__all__ = [
    "ExtraState",
    "NameTable",
    "load_whole",
    "materialise",
    "read_names",
    "unwrapped",
    "whole_state",
]


_COMPILED = "_orig_mod."
_WRAPPED = "_checkpoint_wrapped_module."
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class ModuleBuffer:
    """A buffer by its place, where its module may put another tensor.

    Args:
        module: The module that holds it.
        name: Name of the buffer in the module.
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


Shards = Sequence[ParamShard | LocalParams]
Allowed = Callable[[], AbstractContextManager[None]]


def whole_state(
    model: nn.Module, shards: Shards, allowed: Allowed, device: torch.device | None
) -> dict[str, Any]:
    """The state dict of the model with whole parameters. Collective over the gather groups.

    Args:
        model: The sharded model.
        shards: The shards of all parameter groups.
        allowed: A context in which the model's state dict may be taken.
        device: Device of the copies; None for that of the shards.
    """
    wholes = []
    for shard in shards:
        values = [
            value.clone() if device is None else value.to(device, copy=True)
            for _, value in shard.full_values()
        ]
        wholes.append(_parameters(shard, values))
    own = {one.untyped_storage().data_ptr() for mine in wholes for one in mine}
    with _installed(shards, wholes), allowed():
        state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in own:
            state[name] = value.clone() if device is None else value.to(device, copy=True)
    return dict(state)


def load_whole(
    model: nn.Module,
    shards: Shards,
    names: NameTable,
    allowed: Allowed,
    state: Mapping[str, Any],
) -> None:
    """Take this rank's shard of every parameter, and every buffer. Local.

    Values are assigned rather than copied, so that nothing whole is made beside what the caller
    holds. Where a module copies all the same, there is a second try with memory to copy into.
    """
    loaded = _load(model, shards, names, allowed, state, assigns=True)
    if any(value is None for mine in loaded.values for value in mine):
        loaded = _load(model, shards, names, allowed, state, assigns=False)
    with torch.no_grad():
        for shard, mine in zip(shards, loaded.values, strict=True):
            for index, value in enumerate(mine):
                if value is not None:
                    shard.load(index, value)
        for module, name, buffer in loaded.buffers:
            own = module._buffers.get(name)
            if own is None:
                module._buffers[name] = buffer
            else:
                own.copy_(buffer)


class _Loaded(NamedTuple):
    """Values that a model has read: whole parameters, None for those left alone, and buffers."""

    values: list[list[Tensor | None]]
    buffers: list[tuple[nn.Module, str, Tensor]]


def _load(
    model: nn.Module,
    shards: Shards,
    names: NameTable,
    allowed: Allowed,
    state: Mapping[str, Any],
    *,
    assigns: bool,
) -> _Loaded:
    """Whole values and buffers as the model reads them; the model is as before afterwards."""
    wholes = [_parameters(shard, _unread(shard, assigns=assigns)) for shard in shards]
    before = [(module, dict(module._buffers)) for module in model.modules()]
    for module, own in before:
        # Copies, since they may be written in place before an error.
        module._buffers.update({n: b.clone() for n, b in own.items() if b is not None})
    given = {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}
    try:
        with _installed(shards, wholes), allowed():
            try:
                found = model.load_state_dict(given, strict=False, assign=assigns)
            except RuntimeError as error:
                raise _misfit(shards, names, state, error) from error
            _check_names(found.missing_keys, found.unexpected_keys, names, state)
            values = [[_value(own, assigns=assigns) for own in shard.owners] for shard in shards]
        return _Loaded(
            values,
            [(m, n, b) for m, _ in before for n, b in m._buffers.items() if b is not None],
        )
    finally:
        for module, own in before:
            module._buffers.update(own)


def _unread(shard: ParamShard | LocalParams, *, assigns: bool) -> list[Tensor]:
    """Placeholders that differ from anything that is read: no memory, or no number."""
    dtype = shard.plan.main_dtype
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        if assigns
        else torch.full(shape, torch.nan, dtype=dtype)
        for shape in shard.plan.layout.shapes
    ]


def _value(owners: Sequence[Owner], *, assigns: bool) -> Tensor | None:
    """The value that a parameter was given, by any of its names; None if by none."""
    found = [module._parameters[name] for module, name in owners]
    read = [x for x in found if x is not None and not (x.is_meta if assigns else x.isnan().all())]
    return read[-1].detach() if read else None


def _parameters(shard: ParamShard | LocalParams, values: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(value, requires_grad=shard.plan.is_trainable) for value in values]


@contextmanager
def _installed(shards: Shards, wholes: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
    """Within it, modules hold whole parameters."""
    try:
        for shard, mine in zip(shards, wholes, strict=True):
            install(shard.owners, mine)
        yield
    finally:
        for shard in shards:
            install(shard.owners, shard.parameters)


def _check_names(
    missing: Sequence[str], unexpected: Sequence[str], names: NameTable, state: Mapping[str, Any]
) -> None:
    aliases = {
        alias
        for known in names.parameters.values()
        if any(alias in state for alias in known)
        for alias in known
    }
    lacking = sorted(set(missing) - aliases)
    if lacking or unexpected:
        known = {alias for own in names.parameters.values() for alias in own} | names.buffers.keys()
        raise ConfigError(
            "load_full_state_dict",
            found=f"missing {lacking[:4]}, unknown {sorted(unexpected)[:4]}",
            why="The state dict holds exactly the parameters and buffers of the model.",
            fix=near_misses((sorted(unexpected) or lacking)[0], known),
        )


def _misfit(
    shards: Shards, names: NameTable, state: Mapping[str, Any], error: RuntimeError
) -> ConfigError:
    """The error for what `load_state_dict` raised: most likely another shape."""
    for shard in shards:
        for name, shape in zip(shard.plan.names, shard.plan.layout.shapes, strict=True):
            for alias in names.parameters[name]:
                found = state.get(alias)
                if isinstance(found, Tensor) and tuple(found.shape) != tuple(shape):
                    return ConfigError(
                        f"load_full_state_dict: {alias!r} of shape {tuple(shape)}",
                        found=f"shape {tuple(found.shape)}",
                        why="The whole parameter is loaded, and each rank takes its shard.",
                        fix="Pass an unsharded state dict of the same model.",
                    )
    return ConfigError(
        "load_full_state_dict",
        found=str(error),
        why="The model's own load_state_dict refuses it.",
        fix="Pass an unsharded state dict of the same model.",
    )


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
