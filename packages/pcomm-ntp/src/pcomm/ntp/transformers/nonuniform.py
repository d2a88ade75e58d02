"""A model of transformers becomes one rank's part of it: the layers of its plan are swapped.

Linear layers become those of `pcomm.core.tensor_parallel`, other parameters are cut where they
are, and around modules of experts or of latent keys the sums that the plan asks for are hooked.
The code of the model runs as it is: its attention asks its projections how many heads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    ParamLayout,
    RowParallelLinear,
    split_replicated,
    take_shard,
)
from pcomm.core.tensor_parallel.split import enter, leave
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.transformers.tp_plan import PlannedPart, parts_of

__all__ = ["nonuniform"]


def nonuniform(
    model: nn.Module, plan: NtpPlan, collectives: Collectives, *, rank: int
) -> nn.Module:
    """Make a whole transformers model this rank's part of it, in place. Local.

    Forward and backward are collective over the tensor-parallel group from then on, and equal the
    whole model's: logits are whole on every rank. Weights are copied, so that the whole ones are
    freed; names, dtypes, devices and `requires_grad` stay as they were. Each layer declares its
    `param_layouts`, which `GradSync` and `Session` read. Make the optimizer afterwards.

    Args:
        model: Model of transformers with its weights, equal on all ranks.
        plan: Plan that was made with `units_of` such a model.
        collectives: Collectives of this rank's tensor-parallel group, `groups["tp"].collectives`.
        rank: Global rank of this process.

    Returns:
        The same `model`.

    Raises:
        UnsupportedError: What `units_of` refuses, or a model that is split already.
        ConfigError: The rank is idle, the plan has pipeline stages, or was made with other units.
        TopologyError: The group is not the tensor-parallel one of the rank.
        LayoutError: A parameter of another shape than its units.
    """
    parts = parts_of(model)
    place = plan.place(rank)
    if place.is_idle or plan.topology.axes.get("pp", 1) > 1:
        raise ConfigError(
            f"nonuniform: rank {rank}",
            found="a rank without units" if place.is_idle else "a plan with pipeline stages",
            why="Each rank with units gets its part of all layers.",
            fix="Build a model on ranks with units, by a plan without pp.",
        )
    if (collectives.size, collectives.rank) != (place.degree, place.index):
        raise TopologyError(
            f"nonuniform: rank {collectives.rank} of a group of {collectives.size}",
            found=f"rank {rank} is at index {place.index} of a group of {place.degree}",
            why="A layer's sums run over the ranks that hold its units.",
            fix='Give groups["tp"].collectives of the plan\'s tensor-parallel groups.',
        )
    layouts = {
        name: _layout(name, split.units, plan, place.replica)
        for part in parts
        for name, split in part.splits.items()
    }
    _check_rope(model, parts)
    # Nothing was changed up to here.
    for part in parts:
        _apply(model, part, layouts, collectives)
    return model


def _layout(name: str, units: Units, plan: NtpPlan, replica: int) -> Layout:
    found = plan.units_of(name)
    planned = found[1] if found else Units.replicated()
    if (planned.count, planned.sections) != (units.count, units.sections):
        told = f"{planned.count} units of {planned.sections}" if found else "no units"
        raise ConfigError(
            f"nonuniform: {name!r} in {units.count} units of {units.sections}",
            found=f"a plan that has {told} for it",
            why="All ranks cut a parameter between the units of the plan.",
            fix="Make the plan with units_of(model), for a model of the same configuration.",
        )
    return plan.layout(name, replica)


def _check_rope(model: nn.Module, parts: list[PlannedPart]) -> None:
    for part in parts:
        if part.style == "mla_kv_a_proj" and _rope_width(model, part.name) is None:
            raise UnsupportedError(
                f"nonuniform: {part.name!r}, which the model's plan calls {part.style!r}",
                found="no qk_rope_head_dim beside it",
                why="The rotary columns go to each rank's own heads; the others do not.",
                fix="Take this style out of model.tp_plan together with its attention module.",
            )


def _rope_width(model: nn.Module, name: str) -> int | None:
    holder = model.get_submodule(name.rpartition(".")[0])
    for one in (holder, getattr(holder, "config", None), getattr(model, "config", None)):
        width = getattr(one, "qk_rope_head_dim", None)
        if isinstance(width, int):
            return width
    return None


# -- one part --------------------------------------------------------------------------------


def _apply(
    model: nn.Module, part: PlannedPart, layouts: dict[str, Layout], collectives: Collectives
) -> None:
    holder, _, own = part.name.rpartition(".")
    if part.name in part.splits:
        split = part.splits[part.name]
        _cut(model.get_submodule(holder), own, layouts[part.name], split.dim, collectives.rank)
        return
    module = model.get_submodule(part.name)
    if part.splits:
        assert isinstance(module, nn.Linear)
        layout = layouts[f"{part.name}.weight"]
        model.set_submodule(part.name, _linear(module, part.style, layout, collectives))
    elif part.style == "replicated_with_grad_allreduce":
        # Each rank normalises its own heads.
        _declare(module, **_partial_gradients(module))
    elif part.style == "mla_kv_a_proj":
        width = _rope_width(model, part.name)
        assert width is not None
        module.register_forward_hook(_enters_last_columns(width, collectives))
    elif part.style == "moe_identity_expert":
        module.register_forward_pre_hook(_divides(collectives.size))
    else:
        if part.style == "moe_tp_experts":
            module.register_forward_pre_hook(_enters(collectives))
        module.register_forward_hook(_leaves(collectives))


def _linear(
    whole: nn.Linear, style: str, layout: Layout, collectives: Collectives
) -> ColumnParallelLinear | RowParallelLinear:
    """This rank's part of a linear layer, with the values that it had."""
    told: dict[str, Any] = {
        "bias": whole.bias is not None,
        "initialise": False,
        "device": whole.weight.device,
        "dtype": whole.weight.dtype,
    }
    own: ColumnParallelLinear | RowParallelLinear
    if style.startswith("rowwise"):
        kind = RowParallelLinear if style == "rowwise" else _SplitInputLinear
        own = kind(layout, whole.out_features, collectives, **told)
    else:
        gathers = style in ("colwise_gather_output", "colwise_rep")
        own = ColumnParallelLinear(
            whole.in_features, layout, collectives, gather_output=gathers, **told
        )
    for name, value in whole.named_parameters():
        parameter = own.get_parameter(name)
        split = own.param_layouts[name]
        shard = value.detach()
        if split.layout is not None:
            shard = take_shard(shard, split.layout, collectives.rank, dim=split.dim)
        with torch.no_grad():
            parameter.copy_(shard)
        parameter.requires_grad_(value.requires_grad)
    return own.train(whole.training)


class _SplitInputLinear(RowParallelLinear):
    """A `RowParallelLinear` whose input is whole on every rank, which takes its columns of it."""

    def _split(self, x: Tensor) -> Tensor:
        return super()._split(split_replicated(x, self.layout, self.collectives))


def _cut(holder: nn.Module, own: str, layout: Layout, dim: int, rank: int) -> None:
    """Replace a parameter that its module uses itself by this rank's shard."""
    whole = holder.get_parameter(own)
    shard = take_shard(whole.detach(), layout, rank, dim=dim)
    shard = shard.clone(memory_format=torch.contiguous_format)
    setattr(holder, own, nn.Parameter(shard, requires_grad=whole.requires_grad))
    _declare(holder, **{own: ParamLayout(layout, dim)})


def _partial_gradients(module: nn.Module) -> dict[str, ParamLayout]:
    return {name: ParamLayout(has_partial_gradient=True) for name in module._parameters}


def _declare(module: nn.Module, **layouts: ParamLayout) -> None:
    declared: dict[str, ParamLayout] = getattr(module, "param_layouts", {})
    module.param_layouts = declared | layouts  # type: ignore[assignment]


# -- around a module -------------------------------------------------------------------------

_Before = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]
_After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


def _enters(collectives: Collectives) -> _Before:
    """Hidden states and weights of experts go into what each rank computes a part of."""

    def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            enter(x, collectives) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        )

    return hook


def _leaves(collectives: Collectives) -> _After:
    """The outputs of ranks are added up."""

    def hook(_module: nn.Module, _inputs: tuple[Any, ...], y: Any) -> Any:
        return leave(y, collectives)

    return hook


def _divides(size: int) -> _Before:
    """What all ranks return alike is added up with what they compute in part."""

    def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] / size, *inputs[1:])

    return hook


def _enters_last_columns(width: int, collectives: Collectives) -> _After:
    """The rotary keys, which the heads of all ranks read; the rest goes through a split layer."""

    def hook(_module: nn.Module, _inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        latent, rotary = y.split([y.shape[-1] - width, width], dim=-1)
        return torch.cat([latent, enter(rotary, collectives)], dim=-1)

    return hook
