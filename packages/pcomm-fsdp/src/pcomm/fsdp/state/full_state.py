"""A sharded model's state as that of an unsharded one.

The model itself says what its state is: it gets whole parameters for as long as its own
`state_dict` or `load_state_dict` runs, with all wrappers and hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, near_misses
from pcomm.fsdp.plan.units import Owner, install
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard
from pcomm.fsdp.state.names import NameTable

__all__ = ["load_whole", "whole_state"]

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
