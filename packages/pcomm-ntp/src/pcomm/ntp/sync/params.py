"""The parameters of a model beside what the plan says of each: checked once, then guarded.

They are checked before anything is sent, and before a step: its sums would be wrong with a changed
model, or an old gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError, near_misses
from pcomm.core.layout import Layout, Run
from pcomm.core.tensor_parallel.split import ParamLayout
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units, lies_as_planned

__all__ = ["ModelGuard", "SyncedParam", "synced_params"]


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
    plan: NtpPlan,
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
            raise _foreign(f"module {name!r}", f"module of {kinds.pop()}")
    named = dict(model.named_parameters())
    if unknown := sorted(set(param_layouts) - set(named)):
        raise ConfigError(
            f"GradSync: param_layouts of {', '.join(map(repr, unknown[:4]))}",
            found=f"a model with {len(list(named))} parameters of other names",
            why="Layouts are looked up by the names of model.named_parameters().",
            fix=near_misses(unknown[0], list(named)),
        )
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ConfigError(
            f"GradSync: reduce_dtype={reduce_dtype}",
            found="a type that is not of floating point",
            why="Gradients are numbers of floating point, and so are their sums.",
            fix="Give torch.float32, torch.float64 or torch.bfloat16, or leave it out.",
        )
    found = []
    for name, parameter in named.items():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise _foreign(f"parameter {name!r}", "DTensor, as parallelize_module makes")
        if not parameter.requires_grad:
            continue
        own = param_layouts.get(name, ParamLayout())
        key, units = plan.units_of(name) or ("", None)
        layout: Layout | None = None
        if units is None or not units.is_split:
            key, units = "", None
            if own.layout is not None and not own.layout.is_whole:
                raise LayoutError(
                    f"GradSync: parameter {name!r}",
                    found=f"split over {own.layout.size} ranks, and no units in the plan",
                    why="Without units nothing says which ranks of the other replicas hold the "
                    "same part.",
                    fix="Give its name, or a pattern, with its units to plan(). "
                    + near_misses(name, [one for one, _ in plan.units]),
                )
        else:
            layout = plan.layout(key, place.replica, place.stage)
            _check_split(name, parameter, own, layout, place.index)
        adds = layout is not None or own.has_partial_gradient or place.index == 0
        if reduce_dtype is not None and parameter.is_complex():
            raise ConfigError(
                f"GradSync: reduce_dtype={reduce_dtype}",
                found=f"parameter {name!r}, which is complex",
                why="A sum in a real type would drop the imaginary parts.",
                fix="Leave reduce_dtype out.",
            )
        gradient = _grad_dtype(parameter)
        narrow = gradient in (torch.bfloat16, torch.float16)
        dtype = reduce_dtype or (torch.float32 if narrow else gradient)
        dim = own.dim % max(1, parameter.dim())
        found.append(SyncedParam(name, parameter, key, units, layout, dim, adds, dtype))
    return found


def _check_split(
    name: str, parameter: nn.Parameter, own: ParamLayout, layout: Layout, index: int
) -> None:
    if own.layout is None:
        raise _other_layout(name, "the model holds it whole on each rank", layout)
    if not lies_as_planned(own.layout, layout):
        raise _other_layout(name, f"the model has {own.layout.describe()}", layout)
    shape = tuple(parameter.shape)
    if not -len(shape) <= own.dim < len(shape) or shape[own.dim] != layout.sizes[index]:
        told = f"a shard of shape {shape} at index {index}, split along dim {own.dim}"
        raise _other_layout(name, told, layout)


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    # Callers of torch 2.10 or newer may set another type than that of the parameter.
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype


class ModelGuard:
    """Compares a model with what it was when its parameters were taken. Local.

    Args:
        model: The model.
        params: Its parameters that train.
    """

    def __init__(self, model: nn.Module, params: Sequence[SyncedParam]) -> None:
        self._model, self._params = model, params
        self._known = dict(model.named_parameters())
        self._facts = [(p.shape, p.dtype, p.device) for p in (one.parameter for one in params)]

    def check_model(self) -> None:
        """The model has the parameters that it had; before the first backward of a step.

        Raises:
            ConfigError: One was added, replaced, removed, frozen, made to train, or converted.
        """
        trained = {id(one.parameter) for one in self._params}
        now = dict(self._model.named_parameters())
        for name, parameter in now.items():
            if name not in self._known:
                raise _changed_model(name, "a parameter that was added later")
            if parameter is not self._known[name]:
                raise _changed_model(name, "another parameter than there was")
            if parameter.requires_grad is not (id(parameter) in trained):
                told = f"requires_grad is {parameter.requires_grad} since then"
                raise _changed_model(name, told)
        for name in self._known.keys() - now.keys():
            raise _changed_model(name, "a parameter that was removed")
        for one, facts in zip(self._params, self._facts, strict=True):
            parameter = one.parameter
            if (parameter.shape, parameter.dtype, parameter.device) != facts:
                raise _changed_model(one.name, f"it was {facts}, and was converted")

    def check_cleared(self) -> None:
        """No gradient is left from before the first backward of a step; zeros count as none.

        Raises:
            ConfigError: One is left.
        """
        for one in self._params:
            gradient = one.parameter.grad
            # Waits for the device, but only where a caller keeps gradients as zeros.
            if gradient is not None and bool(gradient.any()):
                raise ConfigError(
                    "GradSync.accumulate",
                    found=f"a gradient of {one.name!r} before the first backward of the step",
                    why="A step is: accumulate() around each backward, is_last=True for the last, "
                    "finish().",
                    fix="Call zero_grad() after the optimizer's step, and before the first one; "
                    "or what is there "
                    "would be summed once more.",
                )


def _other_layout(name: str, found: str, layout: Layout) -> LayoutError:
    """A parameter that lies otherwise than the plan has it."""
    return LayoutError(
        f"GradSync: parameter {name!r}",
        found=f"{found}; the plan has {layout.describe()}",
        why="Sums are cut along the plan's layouts, so the model is built with these.",
        fix="Build the layer with plan.layout(units, replica, stage).",
    )


def _foreign(asked: str, kind: str) -> UnsupportedError:
    """A model that something else splits over ranks, or whose gradients it sums."""
    return UnsupportedError(
        f"GradSync: {asked}",
        found=f"a {kind}, of torch's own parallelism",
        why="It would cut parameters at other places than the plan, or sum gradients once more.",
        fix="Give the plain module; split it by layers of pcomm.core.tensor_parallel, or by others "
        "with param_layouts, that hold plain tensors of the plan's layouts.",
    )


def _changed_model(name: str, found: str) -> ConfigError:
    """A model that is not what it was."""
    return ConfigError(
        f"GradSync: parameter {name!r}",
        found=found,
        why="Hooks and buffers were made for the parameters that the model had.",
        fix="Change the model first, on all ranks, and make another GradSync then.",
    )
