"""Hooks of modules and of autograd, which call the runtime of the model."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pcomm.core.errors import ConfigError
from pcomm.fsdp.runtime.fsdp_runtime import ForwardPass, FsdpRuntime, Unit, closed
from pcomm.fsdp.runtime.param_group import gone

__all__ = ["install_hooks"]


def install_hooks(
    runtime: FsdpRuntime, root: Unit, units: Sequence[Unit], entry_points: Sequence[str]
) -> None:
    """Have `runtime` called at every forward and backward of the units, until it closes. Local.

    Args:
        runtime: The runtime. The modules own it, autograd refers to it weakly.
        root: The unit of the whole model.
        units: All other units.
        entry_points: Methods of the model that compute a forward.
    """
    vars(root.module)["__deepcopy__"] = _refuse_copy
    for name in entry_points:
        setattr(root.module, name, _entry(runtime, root, name, getattr(root.module, name)))
    handles = []
    for unit in units:
        hooks = _UnitHooks(runtime, unit)
        # A compiler that traced them would keep what one call of theirs did for all others.
        before, after = map(torch.compiler.disable, (hooks.before, hooks.after))
        handles.append(
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        )
        handles.append(unit.module.register_forward_hook(after))
    runtime.at_end(functools.partial(_take_off, root, units, entry_points, handles))


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
    raise closed(asked)


def _entry(
    runtime: FsdpRuntime, root: Unit, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    """`method` as the beginning and the end of a micro-batch's forward."""
    hooks = _UnitHooks(runtime, root)
    device_type = next((group.shard.flat.device.type for group in root.groups), "cpu")

    def begin(args: Any, kwargs: Any) -> Any:
        """Inputs of the forward; None for a part of another one."""
        if runtime.in_entry_point or (runtime.phase == "backward" and _is_in_autograd()):
            # Called by another entry point, or computed again for backward.
            return None
        if torch.is_autocast_enabled(device_type):
            # What it keeps of weights belongs to the graph, and to the values, of one forward.
            torch.clear_autocast_cache()
        try:
            runtime.begin(name)
            runtime.in_entry_point = True
            return hooks.before(root.module, args, kwargs)
        except BaseException as error:
            runtime.fail(error)
            raise

    def end(args: Any, output: Any) -> Any:
        output = hooks.after(root.module, args, output)
        runtime.in_entry_point = False
        runtime.end_forward(_has_graph(output))
        return output

    enter, leave, fail = map(torch.compiler.disable, (begin, end, runtime.fail))

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

    def __init__(self, runtime: FsdpRuntime, unit: Unit) -> None:
        self._runtime, self._unit = runtime, unit
        self._self = weakref.ref(self)
        # Uses that have begun and not ended, the innermost last: number of the forward, containers.
        self._lent: list[tuple[int, _MutatedInputs | None]] = []

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the parameters gathered, and watch for backward to leave the unit."""
        runtime, unit = self._runtime, self._unit
        if not runtime.in_entry_point and runtime.phase != "backward":
            raise ConfigError(
                f"fsdp: unit {unit.name!r} called by itself",
                found="the model's forward is not running",
                why="The schedule begins with an entry point of the model.",
                fix="Call the model, or name the method that calls this unit in entry_points.",
            )
        if runtime.phase == "forward":
            runtime.use(unit, "forward")
        elif not unit.is_in_backward:
            runtime.use(unit, "backward")
        given = args, kwargs
        if unit.input_dtype is not None:
            args, kwargs = tree_map_only(
                Tensor, functools.partial(_cast, dtype=unit.input_dtype), (args, kwargs)
            )
        if torch.is_grad_enabled():
            forward = runtime.watched_by(unit)
            if forward is not None:
                args, kwargs = self._watch_inputs(forward, args, kwargs)
        self._lend(given, (args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Have the parameters released, and watch for backward to come to the unit."""
        runtime, unit = self._runtime, self._unit
        lent = self._lent.pop()[1] if self._lent else None
        left_in_inputs = lent.hand_back() if lent is not None else []
        if runtime.phase == "forward":
            runtime.done(unit, "forward")
            if torch.is_grad_enabled():
                tell = functools.partial(_come_to_output, self._self, runtime.current)
                for tensor in _tensors((output, left_in_inputs)):
                    if tensor.requires_grad:
                        tensor.register_hook(tell)
        return output

    def come_to_output(self, forward: ForwardPass) -> None:
        """Backward has come to the unit."""
        runtime, unit = self._runtime, self._unit
        if runtime.begin_backward(forward):
            _end_with_backward(runtime, forward.thread)
        if not unit.is_in_backward:
            runtime.use(unit, "backward")
        unit.passes.add(forward)

    def pass_input(self, forward: ForwardPass) -> None:
        """Backward has passed one use of the unit.

        No hook calls it for a unit whose inputs need no gradient, such as the first one; the end of
        backward reduces those.
        """
        runtime, unit = self._runtime, self._unit
        forward.open_inputs[unit.name] -= 1
        if unit.is_in_backward and forward.has_passed(unit.name) and unit.has_passed():
            runtime.done(unit, "backward")

    def _lend(self, given: tuple[Any, Any], used: tuple[Any, Any]) -> None:
        """Remember the caller's containers, of which the unit gets copies."""
        token = self._runtime.current.token
        # What ended with an error has handed nothing back.
        self._lent = [one for one in self._lent if one[0] == token]
        (args, kwargs), (own_args, own_kwargs) = given, used
        lent = None
        if args is not own_args or kwargs is not own_kwargs:
            lent = _MutatedInputs((*args, *kwargs.values()), (*own_args, *own_kwargs.values()))
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
        raise gone()
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


def _tensors(value: Any, seen: dict[int, Any] | None = None) -> list[Tensor]:
    """Tensors in containers, and in attributes of objects however deep. Local.

    What a function has closed over, what a module holds and what an extension type hides is not
    found.
    """
    found: list[Tensor] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
            continue
        if leaf is None or isinstance(leaf, _LEAVES):
            continue
        # Held, so that an id stands for one object.
        seen = {} if seen is None else seen
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf
            found += _tensors(_attributes(leaf), seen)
    return found


_LEAVES = (
    *(str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size),
    *(nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)


def _attributes(value: object) -> list[Any]:
    """All that an object, or a class in the place of one, holds in attributes of its own."""
    if isinstance(value, type):
        return [one for one in vars(value).values() if isinstance(one, Tensor)]
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, MemberDescriptorType) and hasattr(value, name):
                found.append(getattr(value, name))
    return found


def _refuse_copy(_memo: object) -> nn.Module:
    raise ConfigError(
        "copy.deepcopy of a sharded model",
        found="entry points and hooks that belong to the model it is a copy of",
        why="The copy would compute with the parameters of the original.",
        fix="Copy the model before fully_shard, or keep copies of sharded.parameters().",
    )


def _has_graph(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(output))


_MUTABLE = (list, dict, OrderedDict, defaultdict, deque)


class _MutatedInputs:
    """Lists and dicts that a caller has passed to a unit, which got copies with other tensors.

    What the unit has put into the copies, such as a cache or further losses, goes to the caller.

    Args:
        original: The arguments that the caller passed.
        copy: The same arguments with tensors replaced, made by `torch.utils._pytree`.
    """

    def __init__(self, original: object, copy: object) -> None:
        # Both are held, so that an id stands for one object.
        self._pairs: list[tuple[Any, Any]] = []
        self._originals: dict[int, Any] = {}
        self._walk(original, copy)

    def __bool__(self) -> bool:
        return any(type(original) in _MUTABLE for original, _ in self._pairs)

    def hand_back(self) -> list[Tensor]:
        """Make the caller's containers hold what the copies do. Local.

        Returns:
            The tensors that are new in them.
        """
        new: list[Tensor] = []
        for original, copy in self._pairs:
            if type(original) not in _MUTABLE:
                continue
            keys = list(copy) if isinstance(copy, dict) else range(len(copy))
            found = [self._originals.get(id(copy[key]), copy[key]) for key in keys]
            before = list(original.values() if isinstance(original, dict) else original)
            is_same_order = not isinstance(copy, dict) or list(original) == keys
            if (
                is_same_order
                and len(found) == len(before)
                and all(map(operator.is_, found, before))
            ):
                continue
            known = {id(one) for one in before}
            new += [one for one in found if isinstance(one, Tensor) and id(one) not in known]
            original.clear()
            if isinstance(copy, dict):
                original.update(zip(keys, found, strict=True))
            else:
                original.extend(found)
        return new

    def _walk(self, original: Any, copy: Any) -> None:
        if original is copy:
            return
        self._pairs.append((original, copy))
        self._originals[id(copy)] = original
        for one, other in zip(_children(original), _children(copy), strict=True):
            self._walk(one, other)


def _children(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container.values()
    elif isinstance(container, list | tuple | deque):
        yield from container


def _end_with_backward(runtime: FsdpRuntime, forward_thread: int) -> None:
    """Have the runtime end its backward when the one that is running in autograd ends. Local.

    Torch has no hook for a backward that raises: the caller of backward gets the error, and the
    runtime learns of it when the next forward begins. Peers may wait for this rank by then. So they
    are told as soon as autograd has dropped the callback without calling it, which is before the
    error reaches the caller of backward.

    Args:
        runtime: The runtime, in backward.
        forward_thread: Identifier of the thread that computed the forward.
    """
    callback = _BackwardEnd(runtime)
    dropped = weakref.finalize(
        callback, _fail_if_open, runtime, runtime.num_backwards, forward_thread
    )
    dropped.atexit = False
    Variable._execution_engine.queue_callback(callback)


class _BackwardEnd:
    """Autograd's callback; autograd alone holds it."""

    def __init__(self, runtime: FsdpRuntime) -> None:
        self._runtime = runtime

    def __call__(self) -> None:
        self._runtime.end_backward()


def _fail_if_open(runtime: FsdpRuntime, number: int, forward_thread: int) -> None:
    """Tell the peers that backward `number` raised, if the runtime is still in it."""
    is_open = runtime.phase == "backward" and runtime.num_backwards == number
    # On a GPU a thread of autograd's may be the last to drop the callback, while the caller's goes
    # on with the error. Two threads must not change the runtime: there the next forward finds out.
    if is_open and threading.get_ident() == forward_thread:
        open_units = [name for name, unit in runtime.units.items() if unit.is_in_backward]
        place = f"within unit {open_units[-1]!r}" if open_units else "at its beginning"
        runtime.fail(
            RuntimeError(f"backward raised, {place}; the traceback of this rank says what")
        )
