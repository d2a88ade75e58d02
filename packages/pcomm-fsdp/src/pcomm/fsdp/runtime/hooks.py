"""Hooks of modules and of autograd, which call the engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pcomm.fsdp.guards import running_model_errors, torch_function_errors
from pcomm.fsdp.runtime.backward_end import end_with_backward
from pcomm.fsdp.runtime.engine import Engine
from pcomm.fsdp.runtime.forward_pass import ForwardPass
from pcomm.fsdp.runtime.lent_containers import LentContainers
from pcomm.fsdp.runtime.unit import Unit

__all__ = ["install_hooks"]


def install_hooks(
    engine: Engine, root: Unit, units: Sequence[Unit], entry_points: Sequence[str]
) -> None:
    """Have `engine` called at every forward and backward of the units, until it closes. Local.

    Args:
        engine: The engine. The modules own it, autograd refers to it weakly.
        root: The unit of the whole model.
        units: All other units.
        entry_points: Methods of the model that compute a forward.
    """
    vars(root.module)["__deepcopy__"] = _refuse_copy
    for name in entry_points:
        setattr(root.module, name, _entry(engine, root, name, getattr(root.module, name)))
    handles = []
    for unit in units:
        hooks = _UnitHooks(engine, unit)
        # A compiler that traced them would keep what one call of theirs did for all others.
        before, after = map(torch.compiler.disable, (hooks.before, hooks.after))
        handles.append(
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        )
        handles.append(unit.module.register_forward_hook(after))
    engine.at_end(functools.partial(_take_off, root, units, entry_points, handles))


def _take_off(
    root: Unit,
    units: Sequence[Unit],
    entry_points: Sequence[str],
    handles: Sequence[torch.utils.hooks.RemovableHandle],
) -> None:
    """Leave nothing at the modules but a refusal to compute with shards."""
    for handle in handles:
        handle.remove()
    for unit in units:
        refuse = functools.partial(_refuse, f"the forward of unit {unit.name!r}")
        unit.module.register_forward_pre_hook(refuse, prepend=True)
    for name in entry_points:
        refuse = functools.partial(_refuse, f"{type(root.module).__name__}.{name}")
        setattr(root.module, name, refuse)


def _refuse(asked: str, *_args: object, **_options: object) -> NoReturn:
    raise running_model_errors.closed(asked)


def _entry(engine: Engine, root: Unit, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as the beginning and the end of a micro-batch's forward."""
    hooks = _UnitHooks(engine, root)
    device_type = next((group.shard.flat.device.type for group in root.groups), "cpu")

    def begin(args: Any, kwargs: Any) -> Any:
        """Inputs of the forward; None for a part of another one."""
        if engine.depth or (engine.phase == "backward" and _is_in_autograd()):
            # Called by another entry point, or computed again for backward.
            return None
        if torch.is_autocast_enabled(device_type):
            # What it keeps of weights belongs to the graph, and to the values, of one forward.
            torch.clear_autocast_cache()
        try:
            engine.begin(name)
            engine.depth = 1
            return hooks.before(root.module, args, kwargs)
        except BaseException as error:
            engine.fail(error)
            raise

    def end(args: Any, output: Any) -> Any:
        output = hooks.after(root.module, args, output)
        engine.depth = 0
        engine.end_forward(_has_graph(output))
        return output

    enter, leave, fail = map(torch.compiler.disable, (begin, end, engine.fail))

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = enter(args, kwargs)
        if inputs is None:
            return method(*args, **kwargs)
        try:
            args, kwargs = inputs
            return leave(args, method(*args, **kwargs))
        except BaseException as error:
            fail(error)
            raise

    # The method may be compiled, and what is around it is not.
    outside: Callable[..., Any] = torch.compiler.disable(run, recursive=False)
    return outside


class _UnitHooks:
    """The hooks of one unit. What autograd holds refers to it weakly."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self._engine, self._unit = engine, unit
        self._self = weakref.ref(self)
        # Uses that have begun and not ended, the innermost last: number of the forward, containers.
        self._lent: list[tuple[int, LentContainers | None]] = []

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the parameters gathered, and watch for backward to leave the unit."""
        engine, unit = self._engine, self._unit
        if not engine.depth and engine.phase != "backward":
            raise running_model_errors.unit_called_alone(unit.name)
        if engine.phase == "forward":
            engine.use(unit, "forward")
        elif not unit.is_in_backward:
            engine.use(unit, "backward")
        given = args, kwargs
        if unit.input_dtype is not None:
            args, kwargs = tree_map_only(
                Tensor, functools.partial(_cast, dtype=unit.input_dtype), (args, kwargs)
            )
        if torch.is_grad_enabled():
            forward = engine.watched_by(unit)
            if forward is not None:
                args, kwargs = self._watch_inputs(forward, args, kwargs)
        self._lend(given, (args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Have the parameters released, and watch for backward to come to the unit."""
        engine, unit = self._engine, self._unit
        lent = self._lent.pop()[1] if self._lent else None
        left_in_inputs = lent.hand_back() if lent is not None else []
        if engine.phase == "forward":
            engine.done(unit, "forward")
            if torch.is_grad_enabled():
                tell = functools.partial(_come_to_output, self._self, engine.current)
                for tensor in _tensors((output, left_in_inputs)):
                    if tensor.requires_grad:
                        tensor.register_hook(tell)
        return output

    def come_to_output(self, forward: ForwardPass) -> None:
        """Backward has come to the unit."""
        engine, unit = self._engine, self._unit
        if engine.begin_backward(forward):
            end_with_backward(engine, forward.thread)
        if not unit.is_in_backward:
            engine.use(unit, "backward")
        unit.passes.add(forward)

    def pass_input(self, forward: ForwardPass) -> None:
        """Backward has passed one use of the unit."""
        engine, unit = self._engine, self._unit
        forward.open_inputs[unit.name] -= 1
        if unit.is_in_backward and forward.has_passed(unit.name) and unit.has_passed():
            engine.done(unit, "backward")

    def _lend(self, given: tuple[Any, Any], used: tuple[Any, Any]) -> None:
        """Remember the caller's containers, of which the unit gets copies."""
        token = self._engine.current.token
        # What ended with an error has handed nothing back.
        self._lent = [one for one in self._lent if one[0] == token]
        (args, kwargs), (own_args, own_kwargs) = given, used
        lent = None
        if args is not own_args or kwargs is not own_kwargs:
            lent = LentContainers((*args, *kwargs.values()), (*own_args, *own_kwargs.values()))
        self._lent.append((token, lent or None))

    def _watch_inputs(
        self, forward: ForwardPass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = self._unit.name
        forward.watched.add(name)
        flat, spec = tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if not places:
            # Nothing tells when backward has passed this use of the unit, but its very end does.
            forward.unbounded.add(name)
            return args, kwargs
        forward.open_inputs[name] += 1
        tell = functools.partial(_pass_input, self._self, forward)
        watched = _Watch.apply(  # type: ignore[no-untyped-call]
            tell, *(flat[i] for i in places)
        )
        for place, tensor in zip(places, watched, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs


def _come_to_output(
    hooks: weakref.ref[_UnitHooks], forward: ForwardPass, _gradient: Tensor
) -> None:
    found = hooks()
    if found is None:
        raise running_model_errors.gone()
    found.come_to_output(forward)


def _pass_input(hooks: weakref.ref[_UnitHooks], forward: ForwardPass) -> None:
    found = hooks()
    if found is not None:
        found.pass_input(forward)


class _Watch(torch.autograd.Function):
    """Returns its inputs; calls back when backward has reached all of them."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.tell()
        return (None, *gradients)


def _is_in_autograd() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _tensors(value: Any) -> list[Tensor]:
    found = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def _refuse_copy(_memo: object) -> nn.Module:
    raise torch_function_errors.copied_model()


def _has_graph(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(output))
