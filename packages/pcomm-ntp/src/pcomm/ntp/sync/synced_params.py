"""The parameters of a model beside what the plan says of each: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pcomm.core.layout import Layout, Run
from pcomm.core.tensor_parallel.param_layout import ParamLayout
from pcomm.ntp.planning.declared_layouts import lies_as_planned
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync import errors

__all__ = ["SyncedParam", "synced_params"]

# Of torch.distributed, which names them without being imported here.
_FOREIGN = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True, eq=False)
class SyncedParam:
    """A parameter whose gradient is summed.

    Args:
        name: Its first name in the model.
        parameter: This rank's shard of it.
        key: Name of its units in the plan; empty if it is replicated.
        units: Its units; None if it is replicated.
        layout: Layout of `dim` over this rank's tensor-parallel group; None if it is replicated.
        dim: Dimension along which it is split.
        adds: True if this rank adds its gradient to the sum; of the ranks of a group that hold a
            replicated parameter and the same gradient, the first one does.
        reduce_dtype: Data type of the sum.
    """

    name: str
    parameter: nn.Parameter
    key: str
    units: Units | None
    layout: Layout | None
    dim: int
    adds: bool
    reduce_dtype: torch.dtype

    @property
    def logical_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return ParamLayout(self.layout, self.dim).logical_shape(self.parameter.shape)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Data type of its gradient."""
        return _grad_dtype(self.parameter)

    @property
    def agreed(self) -> str:
        """One line of text that is the same on all ranks of a stage."""
        split = f"split along dim {self.dim} by {self.key}" if self.units else "replicated"
        dtypes = f"gradient of {self.grad_dtype} summed in {self.reduce_dtype}"
        told = f"{self.parameter.dtype}, {dtypes}".replace("torch.", "")
        return f"{self.name}: {list(self.logical_shape)}, {told}, {split}"

    def local_ranges(self, index: int, start: int, stop: int) -> list[Run]:
        """Positions of units `start` to `stop - 1` in the shard at `index`: a run a section."""
        assert self.units is not None
        assert self.layout is not None
        return local_ranges(self.units, self.layout.runs[index], start, stop)


def local_ranges(units: Units, held: tuple[Run, ...], start: int, stop: int) -> list[Run]:
    """Positions, in the tensor that consists of the runs `held`, of a range of units.

    Args:
        units: Units of the dimension.
        held: Runs of one rank, in the order in which they lie in its tensor.
        start: First unit; one run of each section holds it and all up to `stop - 1`.
        stop: The unit after the last one.
    """
    found, offset = [], 0
    for width in units.sections:
        first, last = offset + start * width, offset + stop * width
        place = 0
        for run in held:
            if run.start <= first and last <= run.stop:
                found.append(Run(place + first - run.start, place + last - run.start))
                break
            place += run.length
        else:
            raise AssertionError(f"units {start} to {stop - 1} are not in runs {held}")
        offset += units.count * width
    return found


def synced_params(
    plan: Plan,
    model: nn.Module,
    rank: int,
    param_layouts: Mapping[str, ParamLayout],
    reduce_dtype: torch.dtype | None,
) -> list[SyncedParam]:
    """The parameters of `model` that train, in its order. Local.

    Raises:
        ConfigError: A layout of a name that the model does not have, or a type that cannot hold the
            sums.
        LayoutError: A split parameter without units, with another layout than the plan's, or with
            another shape.
        UnsupportedError: A model that torch's own parallelism splits or sums.
    """
    place = plan.place(rank)
    for name, module in model.named_modules():
        if kinds := {kind.__name__ for kind in type(module).__mro__}.intersection(_FOREIGN):
            raise errors.foreign(f"module {name!r}", f"module of {kinds.pop()}")
    named = dict(model.named_parameters())
    if unknown := sorted(set(param_layouts) - set(named)):
        raise errors.unknown_names(unknown, list(named))
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise errors.not_floating(reduce_dtype)
    found = []
    for name, parameter in named.items():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise errors.foreign(f"parameter {name!r}", "DTensor, as parallelize_module makes")
        if not parameter.requires_grad:
            continue
        own = param_layouts.get(name, ParamLayout())
        key, units = plan.units_of(name) or ("", None)
        layout: Layout | None = None
        if units is None or not units.is_split:
            key, units = "", None
            if own.layout is not None and not own.layout.is_whole:
                raise errors.without_units(name, own.layout, [one for one, _ in plan.units])
        else:
            layout = plan.layout(key, place.replica, place.stage)
            _check_split(name, parameter, own, layout, place.index)
        adds = layout is not None or own.has_partial_gradient or place.index == 0
        if reduce_dtype is not None and parameter.is_complex():
            raise errors.real_sum(name, reduce_dtype)
        gradient = _grad_dtype(parameter)
        narrow = gradient in (torch.bfloat16, torch.float16)
        dtype = reduce_dtype or (torch.float32 if narrow else gradient)
        dim = own.dim % max(1, parameter.dim())
        found.append(SyncedParam(name, parameter, key, units, layout, dim, adds, dtype))
    return found


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    # Callers of torch 2.10 or newer may set another type than that of the parameter.
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype


def _check_split(
    name: str, parameter: nn.Parameter, own: ParamLayout, layout: Layout, index: int
) -> None:
    if own.layout is None:
        raise errors.other_layout(name, "the model holds it whole on each rank", layout)
    if not lies_as_planned(own.layout, layout):
        raise errors.other_layout(name, f"the model has {own.layout.describe()}", layout)
    shape = tuple(parameter.shape)
    if not -len(shape) <= own.dim < len(shape) or shape[own.dim] != layout.sizes[index]:
        told = f"a shard of shape {shape} at index {index}, split along dim {own.dim}"
        raise errors.other_layout(name, told, layout)
