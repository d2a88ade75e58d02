"""Mistakes that can be seen before anything is sharded."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pcomm.core.errors import ConfigError, TopologyError
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles, Scope

__all__ = ["check_model", "check_settings"]


def check_model(
    model: nn.Module,
    roles: Roles,
    scopes: Mapping[str, Scope],
    entry_points: Sequence[str],
    device: torch.device | str | None,
) -> torch.device:
    """Refuse what cannot be sharded; returns the device of the shards. Local.

    Args:
        model: The model.
        roles: Groups of the parameters that no scope selects.
        scopes: Scopes by name, with groups of their own.
        entry_points: Names of methods that begin a forward.
        device: Device of the shards; None for that of the parameters.

    Raises:
        ConfigError: Parameters, or what hangs on them, that would be wrong as shards.
        TopologyError: Groups that do not fit together.
    """
    for name, own in (("", roles), *((name, scope.roles) for name, scope in scopes.items())):
        _check_roles(name, own)
    parameters = dict(model.named_parameters())
    _check_not_sharded(parameters)
    _check_plain(parameters)
    _check_no_optimizer(parameters)
    _check_no_hooks(parameters)
    _check_memory(model, parameters)
    _check_entry_points(model, entry_points)
    return _device_of(parameters, device)


def check_settings(reshard: object, comm: object, precision: object) -> None:
    """Each setting is what its keyword of `fully_shard` takes. Local.

    Raises:
        ConfigError: One is not.
    """
    for name, value, kind in (
        ("reshard", reshard, ReshardPolicy),
        ("comm", comm, CommPolicy),
        ("precision", precision, Precision),
    ):
        if not isinstance(value, kind):
            raise ConfigError(
                f"fully_shard: {name}={value!r}",
                found=f"a {type(value).__name__}",
                why=f"{name} takes a {kind.__name__}, which says all that there is to choose.",
                fix=f"Pass a {kind.__name__} of pcomm.fsdp, with its parentheses.",
            )


def _check_roles(scope: str, roles: Roles) -> None:
    """Gather and reduce have the same ranks; replicas lie across them. Local."""
    name = f"fully_shard: scope {scope!r}" if scope else "fully_shard"
    if roles.gather.ranks != roles.reduce.ranks:
        raise TopologyError(
            f"{name}: gather {roles.gather.key}, reduce {roles.reduce.key}",
            found=f"ranks {list(roles.gather.ranks)} and {list(roles.reduce.ranks)}",
            why="Each rank gathers from the ranks that reduce gradients with it.",
            fix="Open both along the same axes, with different roles.",
        )
    outer = roles.replicate
    if outer is not None:
        mine = roles.gather.ranks[roles.gather.rank]
        if set(outer.ranks) & set(roles.gather.ranks) != {mine}:
            raise TopologyError(
                f"{name}: gather {roles.gather.key}, replicate {outer.key}",
                found=f"ranks {list(roles.gather.ranks)} and {list(outer.ranks)}",
                why="Replicas hold the same shard, so this rank alone is in both groups.",
                fix="Open the replicate group along an axis that the gather group does not have.",
            )


def _check_entry_points(model: nn.Module, names: Sequence[str]) -> None:
    """The model has methods of these names. Local."""
    for name in names:
        if not callable(getattr(model, name, None)):
            raise ConfigError(
                f"fully_shard: entry point {name!r}",
                found=f"{type(model).__name__} has no such method",
                why="Parameters are gathered when one of the model's entry points is called.",
                fix="Name methods of the model that compute its output or its loss.",
            )


def _check_not_sharded(parameters: Mapping[str, nn.Parameter]) -> None:
    """No parameter is a shard already. Local."""
    for name, parameter in parameters.items():
        if hasattr(parameter, "is_pcomm_shard"):
            raise ConfigError(
                f"fully_shard: parameter {name!r}",
                found=f"a shard of shape {tuple(parameter.shape)}",
                why="The model, or a part of it, has been sharded before.",
                fix="Shard the whole model once; parts of it are `units`.",
            )


def _check_plain(parameters: Mapping[str, nn.Parameter]) -> None:
    """Every parameter is a dense tensor of this rank's. Local."""
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"fully_shard: parameter {name!r}",
                found=f"a DTensor with placements {list(parameter.placements)}",
                why="Parameters become views of a flat buffer, which knows nothing of a mesh.",
                fix="Shard with the layers of pcomm.core.tensor_parallel, which hold plain "
                "tensors, or leave DTensors to torch's fully_shard.",
            )
        if _computes_differently(type(parameter)):
            raise ConfigError(
                f"fully_shard: parameter {name!r}",
                found=f"a {type(parameter).__name__}, a tensor whose class changes what torch "
                "computes with it",
                why="Gathered parameters are plain tensors, and would compute without that class.",
                fix="Make it a plain Parameter before sharding, or keep it in a buffer.",
            )
        if parameter.layout != torch.strided:
            raise ConfigError(
                f"fully_shard: parameter {name!r}",
                found=f"layout {parameter.layout}",
                why="Parameters become views of a flat buffer of dense memory.",
                fix="Keep what is not dense in a buffer, or make it dense.",
            )


def _computes_differently(kind: type[Tensor]) -> bool:
    """Whether a class of tensors has rules of its own for functions or operators of torch."""
    if issubclass(kind, FakeTensor):
        # A plain tensor without memory.
        return False
    return any(
        _rule(kind, name) not in (_rule(Tensor, name), _rule(nn.Parameter, name))
        for name in ("__torch_function__", "__torch_dispatch__")
    )


def _rule(kind: type[Tensor], name: str) -> object:
    found = getattr(kind, name)
    return getattr(found, "__func__", found)


def _check_no_optimizer(parameters: Mapping[str, nn.Parameter]) -> None:
    """No optimizer holds a parameter that is about to be sharded. Local."""
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    kinds = _and_subclasses(Optimizer)
    # Each instance refers to its class. To list all objects of the process costs twice the time.
    for thing in gc.get_referrers(*kinds):
        # By type, since isinstance would run code of lazy objects.
        if type(thing) not in kinds or not hasattr(thing, "param_groups"):
            continue
        for group in thing.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_id:
                    raise ConfigError(
                        f"fully_shard: parameter {by_id[id(parameter)]!r}",
                        found=f"an optimizer of type {type(thing).__name__} that holds it",
                        why="Its steps would change tensors that the model no longer uses.",
                        fix="Shard first, then make the optimizer of sharded.parameters().",
                    )


def _check_no_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """No parameter has a hook of autograd's. Local."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"fully_shard: parameter {name!r}",
                found="a hook of autograd's on it",
                why="The gathered parameter takes its place, and the hook would never be called.",
                fix="Change gradients after backward, or register the hook inside forward.",
            )


def _check_memory(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Parameters share no memory with each other, nor with what else a module holds. Local."""
    end, owner = 0, ""
    ranges = [(*_extent(p), name) for name, p in parameters.items() if p.numel() and _has_memory(p)]
    for begin, stop, name in sorted(ranges):
        if begin < end:
            raise _shared(name, f"parameter {owner!r}")
        end, owner = stop, name
    storages = {
        p.untyped_storage().data_ptr(): name for name, p in parameters.items() if _has_memory(p)
    }
    ids = {id(parameter): name for name, parameter in parameters.items()}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            # Its list of weights is made again in a forward that finds others.
            continue
        for attribute, value in vars(module).items():
            if attribute == "_parameters":
                continue
            for leaf in tree_leaves(value):
                if not isinstance(leaf, Tensor):
                    continue
                found = ids.get(id(leaf))
                if found is None and leaf.numel() and leaf.layout == torch.strided:
                    place = leaf.untyped_storage().data_ptr() if _has_memory(leaf) else 0
                    found = storages.get(place)
                if found is not None:
                    raise _shared(found, f"{attribute} of module {module_name or '(root)'!r}")


def _has_memory(x: Tensor) -> bool:
    """Whether there are addresses to compare: on the meta device, and of fake tensors, are none."""
    return x.untyped_storage().device.type != "meta"


def _extent(x: Tensor) -> tuple[int, int]:
    """First address of a tensor's memory, and the one after its last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


def _shared(name: str, other: str) -> ConfigError:
    return ConfigError(
        f"fully_shard: parameter {name!r}",
        found=f"{other} lies in the same memory",
        why="Each becomes a part of a flat buffer of its own, and no longer follows the other.",
        fix="Tie modules by one Parameter object; compute views of it inside forward; or clone.",
    )


def _device_of(
    parameters: Mapping[str, nn.Parameter], device: torch.device | str | None
) -> torch.device:
    """The one device of all parameters, or `device` for those on the meta device. Local."""
    found: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        found.setdefault(parameter.device, name)
    real = [place for place in found if place.type != "meta"]
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not found:
        return device or torch.device("cpu")
    target = device or (real[0] if len(real) == len(found) else None)
    if target is None or any(place != target for place in real):
        where = ", ".join(f"{name!r} on {place}" for place, name in found.items())
        raise ConfigError(
            f"fully_shard: device {'of the parameters' if device is None else device}",
            found=where,
            why="A flat buffer lies on one device, and the meta device holds no numbers.",
            fix="Move the model to one device first; for a meta model pass device= as well.",
        )
    return target


def _and_subclasses(kind: type) -> set[type]:
    """A class and all that derive from it."""
    return {kind}.union(*map(_and_subclasses, type.__subclasses__(kind)))
