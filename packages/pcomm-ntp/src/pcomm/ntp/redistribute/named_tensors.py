"""The tensors of a model and its optimizer that a plan spreads, by name; views in checkpoints.

Names are those of checkpoints: `model.NAME` for a parameter or buffer, `optimizer.KEY.NAME` for
state of the same shape as the parameter. Single numbers in an optimizer's state, such as a count
of steps, are equal on all ranks and not part of it. State of any other shape, such as the factors
of Adafactor, is refused: nothing says how it would be split. Checkpoints are in logical order:
saved under one plan, they are read under any other, or without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem
from torch.optim import Optimizer

from pcomm.core.checkpoint import ShardView
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.redistribute.planned_moves import split_units

__all__ = [
    "StateEntry",
    "add_state",
    "parameter_name",
    "shard_views",
    "state_entries",
    "state_tensors",
]


class StateEntry(NamedTuple):
    """An entry of an optimizer's state that has the shape of its parameter.

    Attributes:
        name: Name among the state tensors, `optimizer.KEY.NAME`.
        parameter: Name of the parameter in the model.
        key: Key in the state of the parameter, such as `"exp_avg"`.
        dtype: Data type as text, such as `"float32"`.
    """

    name: str
    parameter: str
    key: str
    dtype: str


def parameter_name(name: str) -> str:
    """The parameter or buffer to which a tensor belongs: `w` for `optimizer.exp_avg.w`.

    Raises:
        ConfigError: A name that begins neither with `model.` nor with `optimizer.KEY.`.
    """
    kind, _, rest = name.partition(".")
    if kind == "model" and rest:
        return rest
    key, _, parameter = rest.partition(".")
    if kind == "optimizer" and key and parameter:
        return parameter
    raise ConfigError(
        f"redistribute: tensor {name!r}",
        found="a name of another form",
        why="The name says to which parameter a tensor belongs, and so how it is split.",
        fix="Name it model.NAME or optimizer.KEY.NAME; state_tensors does.",
    )


def state_tensors(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    optimized: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Parameters, persistent buffers, and state of their shapes, without copies. Local.

    A tied parameter is there once, under its first name.

    Args:
        model: This rank's part of the model.
        optimizer: Optimizer of its parameters.
        optimized: What the optimizer has of each parameter, by name, where it has parts alone; by
            default the parameters themselves.

    Raises:
        UnsupportedError: The optimizer has state of another shape.
    """
    found = {f"model.{name}": one.detach() for name, one in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            found[f"model.{name}"] = buffer.detach()
    for name, _, _, tensor in _entries(model, optimizer, optimized):
        found[name] = tensor.detach()
    return found


def state_entries(model: nn.Module, optimizer: Optimizer) -> tuple[StateEntry, ...]:
    """The entries of the optimizer's state that have the shape of their parameter. Local.

    They are what `add_state` makes on a rank whose optimizer has no state yet.

    Raises:
        UnsupportedError: The optimizer has state of another shape.
    """
    return tuple(
        StateEntry(name, parameter, key, str(tensor.dtype).removeprefix("torch."))
        for name, parameter, key, tensor in _entries(model, optimizer)
    )


def add_state(model: nn.Module, optimizer: Optimizer, entries: Iterable[StateEntry]) -> None:
    """Make entries of an optimizer's state that are not there yet, as zeros. Local.

    An optimizer makes its state in its first step; `redistribute` fills tensors that exist.

    Args:
        model: This rank's part of the model.
        optimizer: Optimizer of its parameters.
        entries: Result of `state_entries` on a rank with state. Those of parameters that this rank
            does not have, or does not optimize, are left out.
    """
    optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = dict(model.named_parameters())
    for entry in entries:
        parameter = parameters.get(entry.parameter)
        if parameter is not None and id(parameter) in optimized:
            own = optimizer.state[parameter]
            if entry.key not in own:
                dtype = getattr(torch, entry.dtype)
                own[entry.key] = torch.zeros_like(parameter, dtype=dtype)


def _entries(
    model: nn.Module,
    optimizer: Optimizer | None,
    optimized: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, str, str, Tensor]]:
    if optimizer is None:
        return
    for name, parameter in (optimized or dict(model.named_parameters())).items():
        # A look at `state[parameter]` would make an empty entry.
        for key, value in optimizer.state.get(parameter, {}).items():
            # A parameter of one number has the shape of a count; the count is not spread.
            is_count = key == "step"
            if not isinstance(value, Tensor) or is_count:
                continue
            if value.shape == parameter.shape:
                yield f"optimizer.{key}.{name}", name, key, value
            elif value.numel() > 1:
                raise UnsupportedError(
                    f"redistribute: state {key!r} of {name!r} in {type(optimizer).__name__}",
                    found=f"shape {tuple(value.shape)}, the parameter has {tuple(parameter.shape)}",
                    why="Units say how a parameter is split, and so state of its shape; this would "
                    "be lost.",
                    fix="Use an optimizer whose state has the shape of its parameters, such as "
                    "AdamW or SGD with momentum.",
                )


@dataclass(frozen=True)
class _ReadView(ShardView):
    """A view of a shard that another replica saves."""

    def clone(self) -> ShardView:
        """This view: a copy for a later save is not needed."""
        return self

    def write_items(self, name: str) -> list[WriteItem]:
        """No items: another replica writes them."""
        return []


def shard_views(
    plan: NtpPlan,
    rank: int,
    tensors: Mapping[str, Tensor],
    param_layouts: Mapping[str, ParamLayout],
) -> dict[str, ShardView]:
    """Views for `ShardSavePlanner` and `ShardLoadPlanner`, at logical offsets. Local.

    The canonical replica of each stage saves, at the first place of the other axes, and all ranks
    read; so a checkpoint has every element once, and which ranks had failed is not visible in it.
    All ranks of a process group call `dcp.save` and `dcp.load` with it as `process_group`, such as
    that of the group `ntp.all`. Without one DCP takes the default group: then idle ranks call it,
    too, with the empty mapping that they get, and torch.distributed has to be initialised.

    Args:
        plan: Plan that is in force.
        rank: Global rank of this process.
        tensors: State tensors of this rank by name, as `state_tensors` names them.
        param_layouts: Layouts of the parameters of this rank's model; the dimension is taken from
            them, and the layout from the plan.

    Raises:
        ConfigError: A name of another form.
        LayoutError: A tensor that is not this rank's shard; when it is saved or loaded.
    """
    place = plan.place(rank)
    if place.is_idle:
        return {}
    coordinates = plan.topology.coordinates(rank)
    inner = [n for axis, n in coordinates.items() if axis not in ("tp", "dp", "pp")]
    is_saved = place.replica == plan.canonical_replica(place.stage) and not any(inner)
    kind = ShardView if is_saved else _ReadView
    views: dict[str, ShardView] = {}
    for name, tensor in tensors.items():
        parameter = parameter_name(name)
        if split_units(plan, parameter) is None:
            views[name] = kind(tensor, ParamLayout(), 0)
            continue
        layout = plan.layout(parameter, place.replica, place.stage)
        dim = param_layouts.get(parameter, ParamLayout()).dim
        views[name] = kind(tensor, ParamLayout(layout, dim), place.index)
    return views
