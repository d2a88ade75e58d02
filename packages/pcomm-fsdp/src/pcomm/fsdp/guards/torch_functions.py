"""Torch's functions around a sharded model that would take this rank's shards for the whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel.elementwise import first_mixed, known_mixed
from pcomm.fsdp.guards import torch_function_errors
from pcomm.fsdp.guards.gradient_origin import GradientOrigin
from pcomm.fsdp.guards.shard_gradient import mark_shard
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard

__all__ = ["Guards"]


@dataclass(frozen=True)
class _ShardMark:
    """The facts about a shard that lie on it.

    Args:
        name: Name of the parameter.
        shape: Shape of the whole parameter.
        is_entire: True if one rank holds all of it.
        guards: The guards of its model.
    """

    name: str
    shape: tuple[int, ...]
    is_entire: bool
    guards: weakref.ReferenceType[Guards]


class Guards:
    """Refuses, on the model and its optimizers, what would be wrong with shards. Local.

    Args:
        model: The sharded model.
        shards: The shards of all parameter groups. Without one that several ranks share, nothing
            is guarded.
    """

    def __init__(self, model: nn.Module, shards: Sequence[ParamShard | LocalParams]) -> None:
        self._allows_shards = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        _mark_gradients(shards)
        cut = [shard for shard in shards if shard.plan.gather.size > 1]
        if not cut:
            return
        for shard in cut:
            self._guard_parameters(shard)
        owners = {module for shard in cut for own in shard.owners for module, _ in own}
        for module in model.modules():
            if any(inner in owners for inner in module.modules()):
                self._guard_module(module, is_root=module is model)
        _living_guards().add(self)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within it, state dicts are of this rank's shards. Local."""
        before, self._allows_shards = self._allows_shards, True
        try:
            yield
        finally:
            self._allows_shards = before

    def _guard_parameters(self, shard: ParamShard | LocalParams) -> None:
        layout = shard.plan.layout
        for index, name in enumerate(shard.plan.names):
            parameter = shard.parameters[index]
            parameter.pcomm_shard = _ShardMark(  # type: ignore[attr-defined]
                name, layout.shapes[index], layout.is_entire(index), weakref.ref(self)
            )
            vars(parameter)["__deepcopy__"] = partial(_refuse_copy, f"parameter {name!r}")
            vars(parameter)["__reduce_ex__"] = partial(_refuse_pickle, f"parameter {name!r}")
            vars(parameter)["view"] = partial(_refuse_view, name)

    def _guard_module(self, module: nn.Module, *, is_root: bool) -> None:
        what = f"a sharded {type(module).__name__}"
        module.register_state_dict_pre_hook(partial(_before_state_dict, self))
        module.register_load_state_dict_pre_hook(partial(_before_load, self))
        vars(module).setdefault("__deepcopy__", partial(_refuse_copy, what))
        vars(module)["__reduce_ex__"] = partial(_refuse_pickle, what)
        if is_root:
            # DistributedDataParallel asks a module for it before it sends anything.
            vars(module)["_ddp_params_and_buffers_to_ignore"] = _RefusesDdp()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer of this model fits to shards; before its step, and again if it has grown.

        Raises:
            ConfigError: It has state of an unsharded model.
            UnsupportedError: It looks at whole matrices, of which ranks hold shards, or nothing can
                tell whether it does.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._seen.get(optimizer) == len(parameters):
            return
        for parameter in parameters:
            _check_state(optimizer, parameter, _mark_of(parameter, self))
        marks = [found for p in parameters if (found := _mark_of(p, self)) is not None]
        if marks and optimizer not in self._seen:
            optimizer.register_state_dict_pre_hook(partial(_before_optimizer_state, self))
            optimizer.register_load_state_dict_pre_hook(partial(_before_optimizer_load, self))
        self._seen.setdefault(optimizer, 0)
        cut = [mark.name for mark in marks if not mark.is_entire]
        kind = known_mixed(optimizer)
        if kind and not cut and any(_mark_of(p, self) and not p.numel() for p in parameters):
            raise torch_function_errors.scattered_matrices(optimizer, kind)
        if cut and kind:
            raise torch_function_errors.cut_matrices(optimizer, kind, cut)
        dims = {p: 0 for p in parameters if (m := _mark_of(p, self)) and not m.is_entire}
        mixed = first_mixed(optimizer, dims)
        if mixed is not None:
            kind, mark = type(optimizer).__name__, _mark_of(mixed, self)
            raise torch_function_errors.cut_matrices(optimizer, kind, [mark.name] if mark else [])
        self._seen[optimizer] = len(parameters)

    def refuse_shards(self, asked: str, fix: str) -> None:
        """Raise, unless within `allowed`."""
        if not self._allows_shards:
            raise torch_function_errors.state_dict_of_shards(asked, fix)


def _mark_gradients(shards: Sequence[ParamShard | LocalParams]) -> None:
    """Tell gradients which groups hold their other shards."""
    distinct: dict[tuple[int, ...], Group] = {}
    for shard in shards:
        plan = shard.plan
        for one in (plan.gather, plan.replicate, plan.spread):
            if one is not None:
                distinct.setdefault(one.ranks, one)
    model_groups = sorted(distinct.values(), key=lambda group: (-group.size, group.name))
    for shard in shards:
        over = (shard.plan.gather, shard.plan.spread)
        layout = shard.plan.layout
        origin = GradientOrigin(
            [one for one in over if one is not None],
            model_groups,
            frozenset(i for i in range(len(shard.plan.names)) if layout.is_entire(i)),
        )
        if isinstance(shard, ParamShard):
            shard.origin = origin
        elif origin.has_peers and shard.plan.is_trainable:
            shard.after_gradients(partial(_mark_gradient, origin))


def _mark_gradient(origin: GradientOrigin, index: int, parameter: Tensor) -> None:
    """Ranks that hold other parameters count in a check for overflow, and in a norm if spread."""
    if type(parameter.grad) is Tensor:
        parameter.grad = mark_shard(parameter.grad, origin, index)


def _check_state(optimizer: Optimizer, parameter: Tensor, mark: _ShardMark | None) -> None:
    """State was not loaded from an unsharded model's, before hooks were there to refuse it."""
    for key, value in optimizer.state.get(parameter, {}).items():
        is_of_shard = not isinstance(value, Tensor) or value.shape in (parameter.shape, ())
        if mark is not None and not is_of_shard and tuple(value.shape) == mark.shape:
            raise torch_function_errors.unsharded_state(
                optimizer, key, mark.name, mark.shape, parameter
            )


def _mark_of(parameter: Any, guards: Guards) -> _ShardMark | None:
    mark = getattr(parameter, "pcomm_shard", None)
    return mark if isinstance(mark, _ShardMark) and mark.guards() is guards else None


# -- hooks that torch calls -------------------------------------------------------------------


@functools.cache
def _living_guards() -> weakref.WeakSet[Guards]:
    """The guards of all living models of this process, asked before each step of any optimizer.

    Torch has one list of such hooks. Ours stays in it: a hook that went with its model would change
    the list whenever a model is collected, which may be while torch goes through it, and that ends
    the step of an optimizer of another model with an error.
    """
    living: weakref.WeakSet[Guards] = weakref.WeakSet()
    register_optimizer_step_pre_hook(partial(_before_step, living))
    return living


def _before_step(living: weakref.WeakSet[Guards], optimizer: Optimizer, *_: Any) -> None:
    for guards in list(living):
        guards.check_optimizer(optimizer)


def _before_state_dict(guards: Guards, module: nn.Module, *_: Any) -> None:
    guards.refuse_shards(
        f"state_dict() of a sharded {type(module).__name__}",
        "Call sharded.full_state_dict() on all ranks, and save it on one (torch.save, "
        "save_pretrained(state_dict=...)); or save_checkpoint of model_shard_views(sharded). "
        "Within sharded.as_shards() it is this rank's shards.",
    )


def _before_load(guards: Guards, module: nn.Module, *_: Any) -> None:
    guards.refuse_shards(
        f"load_state_dict() of a sharded {type(module).__name__}",
        "Call sharded.load_full_state_dict(state) with the unsharded state dict on all ranks; or "
        "load_checkpoint with model_shard_views(sharded). Within sharded.as_shards() it takes "
        "shards.",
    )


def _before_optimizer_state(guards: Guards, optimizer: Optimizer) -> None:
    guards.refuse_shards(
        f"state_dict() of {type(optimizer).__name__} of a sharded model",
        "Call save_checkpoint with optimizer_shard_views(sharded, optimizer) on all ranks. Within "
        "sharded.as_shards() it is that of this rank's shards.",
    )


def _before_optimizer_load(guards: Guards, optimizer: Optimizer, *_: Any) -> None:
    guards.refuse_shards(
        f"load_state_dict() of {type(optimizer).__name__} of a sharded model",
        "Call load_checkpoint with optimizer_shard_views(sharded, optimizer) on all ranks. Within "
        "sharded.as_shards() it takes the state of this rank's shards.",
    )


def _refuse_copy(what: str, _memo: object = None) -> NoReturn:
    raise torch_function_errors.copied(what)


def _refuse_pickle(what: str, _protocol: object = None) -> NoReturn:
    raise torch_function_errors.pickled(what)


def _refuse_view(name: str, *_shape: object, **_options: object) -> NoReturn:
    raise torch_function_errors.viewed(name)


class _RefusesDdp:
    """Names of parameters that DistributedDataParallel should ignore: asking is an error."""

    def __iter__(self) -> Iterator[str]:
        raise torch_function_errors.sharded_twice()
