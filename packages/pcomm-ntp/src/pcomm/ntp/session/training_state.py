"""What moves between generations: parameters, optimizer state of their shape, and scalars.

Tensors that have the shape of a parameter are cut like it, and move. Everything else of an
optimizer, such as its count of steps, learning rate and betas, is the same on all ranks and travels
as text through the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.core.tensor_parallel.elementwise import first_mixed, known_mixed
from pcomm.ntp.planning.plan import Plan

__all__ = ["Built", "agreed_lines", "check_built", "scalars_of", "set_scalars"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Built:
    """What `build` returns for a generation.

    Args:
        model: This rank's shard of the model, built for the plan and the groups.
        optimizer: Optimizer of its parameters; it may be fresh, since its state arrives. Settings
            of a group other than numbers, texts and lists of these stay as they are built. It
            computes each element by itself: replicas cut a parameter at different places, so a
            norm or product of a shard would let them drift apart.
        param_layouts: Layout of each parameter by its name; by default those that the model's
            layers declare.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    param_layouts: Mapping[str, ParamLayout] | None = None

    @property
    def layouts(self) -> Mapping[str, ParamLayout]:
        """The layouts that were given, or those that the model's layers declare."""
        own = self.param_layouts
        return param_layouts_of(self.model) if own is None else own


def check_built(found: object, plan: Plan, *, is_start: bool) -> Built:
    """What `build` has returned, if a session can train it. Local.

    Args:
        found: The object that `build` has returned.
        plan: The plan that it has built for.
        is_start: True to try an optimizer that is not torch's, which takes tenths of a second.

    Raises:
        ConfigError: It is no `Built`.
        UnsupportedError: The optimizer looks at whole tensors of which ranks hold parts, or nothing
            can tell whether it does; or it spreads its state over ranks.
    """
    if not isinstance(found, Built):
        raise ConfigError(
            "Session: build",
            found=f"a function that returns a {type(found).__name__}",
            why="The session moves the state of both, model and optimizer.",
            fix="Return Built(model, optimizer).",
        )
    if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(found.optimizer).__mro__}:
        raise UnsupportedError(
            "Session: ZeroRedundancyOptimizer",
            found="an optimizer that spreads its state over ranks, and communicates in step()",
            why="A rank that dies takes its part along, and may die while others are in step().",
            fix="Use the optimizer that it wraps; each rank holds the state of its own units.",
        )
    names = {
        own: name
        for name, own in found.model.named_parameters()
        if (units := plan.units_of(name)) and units[1].is_split
    }
    optimized = [one for group in found.optimizer.param_groups for one in group["params"]]
    split = [own for own in optimized if own in names]
    mixed = split[0] if split and known_mixed(found.optimizer) else None
    if mixed is None and split and is_start:
        layouts = found.layouts
        mixed = first_mixed(
            found.optimizer, {own: one.dim for own in split if (one := layouts.get(names[own]))}
        )
    if mixed is not None:
        raise UnsupportedError(
            f"Session: optimizer {type(found.optimizer).__name__} of {names[mixed]!r}",
            found="a parameter of which each rank holds a part",
            why="It takes norms or products of whole tensors. Of parts these differ between "
            "replicas with different degrees, which would drift apart once a rank has died.",
            fix="Use an elementwise optimizer, such as AdamW or SGD; or give it only "
            "parameters without units.",
        )
    return found


def agreed_lines(built: Built) -> list[str]:
    """Kind and settings of the optimizer, a line each; the same on all ranks of a stage. Local.

    Raises:
        ConfigError: As `scalars_of`.
        UnsupportedError: As `scalars_of`.
    """
    told = json.loads(scalars_of(built))
    names = {id(own): name for name, own in built.model.named_parameters()}
    kind = type(built.optimizer)
    lines = [f"optimizer: {kind.__module__}.{kind.__qualname__}"]
    for number, group in enumerate(built.optimizer.param_groups):
        lines += [f"{key} of group {number}: {v}" for key, v in told["groups"][number].items()]
        lines += [f"group {number}: {names.get(id(one))}" for one in group["params"]]
    return [*lines, *(f"state of {name}: {own}" for name, own in told["state"].items())]


def scalars_of(built: Built) -> str:
    """Text of all that `set_scalars` needs; the same on ranks with equal state. Local.

    Raises:
        ConfigError: The optimizer has state of a parameter that the model does not have.
        UnsupportedError: It has state that is neither of its parameter's shape nor one number.
    """
    names: dict[Tensor, str] = {own: name for name, own in built.model.named_parameters()}
    groups = []
    for group in built.optimizer.param_groups:
        told = {k: _told(v) for k, v in group.items() if k != "params" and _is_plain(v)}
        groups.append(told)
    state: dict[str, dict[str, Any]] = {}
    for parameter, own in built.optimizer.state.items():
        if parameter not in names:
            raise ConfigError(
                "Session: the optimizer",
                found="state of a parameter that is not one of the model's",
                why="State moves with the parameters of the model, by their names.",
                fix="Give the optimizer parameters of the model alone.",
            )
        state[names[parameter]] = {
            key: _told_state(names[parameter], key, value, parameter) for key, value in own.items()
        }
    return json.dumps({"groups": groups, "state": state})


def set_scalars(built: Built, text: str) -> None:
    """Give a fresh optimizer the scalars of another, and room for its state. Local.

    Args:
        built: Model and optimizer that get them.
        text: Result of `scalars_of`, maybe on another rank of the stage.

    Raises:
        ConfigError: The optimizers have other numbers of groups.
    """
    found = json.loads(text)
    num_groups = len(built.optimizer.param_groups)
    if num_groups != len(found["groups"]):
        raise ConfigError(
            "Session: the optimizer that build returns",
            found=f"{num_groups} groups of parameters, and {len(found['groups'])} before",
            why="Settings such as learning rates go from group to group.",
            fix="Make the same groups under every plan, empty ones included.",
        )
    parameters = dict(built.model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    # Where torch's own load_state_dict keeps the count, too.
    on_device = {
        names[one]
        for group in built.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for one in group["params"]
        if one in names
    }
    for group, told in zip(built.optimizer.param_groups, found["groups"], strict=True):
        for key, value in told.items():
            group[key] = _as_told(value, group.get(key))
    for name, own in found["state"].items():
        if name not in parameters:
            continue
        state = built.optimizer.state[parameters[name]]
        for key, value in own.items():
            if isinstance(value, Mapping) and "shaped" in value:
                dtype = getattr(torch, value["shaped"])
                state[key] = torch.zeros_like(parameters[name], dtype=dtype).detach()
            else:
                state[key] = _as_told(value, state.get(key))
                if key == "step" and isinstance(state[key], Tensor) and name in on_device:
                    state[key] = state[key].to(parameters[name].device)


def _is_shaped(key: str, value: object, parameter: Tensor) -> bool:
    # A parameter of one number has the shape of a count.
    return isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"


def _told_state(name: str, key: str, value: object, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and _is_shaped(key, value, parameter):
        return {"shaped": str(value.dtype).removeprefix("torch.")}
    if _is_plain(value):
        return _told(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise UnsupportedError(
        f"Session: optimizer state {key!r} of parameter {name!r}",
        found=f"a {type(value).__name__}{shape}, for a parameter of shape {tuple(parameter.shape)}",
        why="State is cut like its parameter, or is one number that all ranks share.",
        fix="Use an optimizer with such state, such as SGD, Adam or AdamW.",
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.item(), "dtype": dtype, "shape": list(value.shape)}
    return list(value) if isinstance(value, tuple) else value


def _as_told(value: Any, now: Any) -> Any:
    if isinstance(value, Mapping):
        device = now.device if isinstance(now, Tensor) else None
        dtype = getattr(torch, value["dtype"])
        return torch.full(value["shape"], value["tensor"], dtype=dtype, device=device)
    return tuple(value) if isinstance(value, list) and isinstance(now, tuple) else value
