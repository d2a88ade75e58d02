"""Torch's functions around a sharded model that would take this rank's shards for the whole.

State dicts, copies, pickles, optimizers and DistributedDataParallel are refused, with the call to
use instead. Functions of a gradient are guarded by the gradient: `runtime/shard_gradient.py`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel.optimizers import first_mixed, known_mixed
from pcomm.fsdp.runtime.shard_gradient import ShardGroups, mark_shard
from pcomm.fsdp.runtime.shards import LocalParams, ParamShard

__all__ = ["Guards"]

# What is refused of whose class, and what to do instead.
_MODULE_STATE = (
    "state_dict() of a sharded {}",
    "Call sharded.full_state_dict() on all ranks, and save it on one (torch.save, "
    "save_pretrained(state_dict=...)); or save_checkpoint of model_shard_views(sharded). "
    "Within sharded.as_shards() it is this rank's shards.",
)
_MODULE_LOAD = (
    "load_state_dict() of a sharded {}",
    "Call sharded.load_full_state_dict(state) with the unsharded state dict on all ranks; or "
    "load_checkpoint with model_shard_views(sharded). Within sharded.as_shards() it takes "
    "shards.",
)
_OPTIMIZER_STATE = (
    "state_dict() of {} of a sharded model",
    "Call save_checkpoint with optimizer_shard_views(sharded, optimizer) on all ranks. Within "
    "sharded.as_shards() it is that of this rank's shards.",
)
_OPTIMIZER_LOAD = (
    "load_state_dict() of {} of a sharded model",
    "Call load_checkpoint with optimizer_shard_views(sharded, optimizer) on all ranks. Within "
    "sharded.as_shards() it takes the state of this rank's shards.",
)


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
        complete: Waits for a collective of gradients, with a name for it in errors.

    Attributes:
        allows_shards: True within `allowed`.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[ParamShard | LocalParams],
        complete: Callable[[Pending, str], Tensor],
    ) -> None:
        self.allows_shards = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        _mark_gradients(shards, complete)
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
        before, self.allows_shards = self.allows_shards, True
        try:
            yield
        finally:
            self.allows_shards = before

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
        module.register_state_dict_pre_hook(partial(_refuse_shards, self, *_MODULE_STATE))
        module.register_load_state_dict_pre_hook(partial(_refuse_shards, self, *_MODULE_LOAD))
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
            state = partial(_refuse_shards, self, *_OPTIMIZER_STATE)
            optimizer.register_state_dict_pre_hook(state)
            load = partial(_refuse_shards, self, *_OPTIMIZER_LOAD)
            optimizer.register_load_state_dict_pre_hook(load)
        self._seen.setdefault(optimizer, 0)
        cut = [mark.name for mark in marks if not mark.is_entire]
        kind = known_mixed(optimizer)
        if kind and not cut and any(_mark_of(p, self) and not p.numel() for p in parameters):
            raise UnsupportedError(
                f"step of {type(optimizer).__name__}",
                found="parameters that are entire on another rank, and have no elements here",
                why=f"{kind} takes means of all elements of a matrix.",
                fix="Give it [p for p in sharded.parameters() if p.numel()].",
            )
        if cut and kind:
            raise _cut_matrices(optimizer, kind, cut)
        dims = {p: 0 for p in parameters if (m := _mark_of(p, self)) and not m.is_entire}
        mixed = first_mixed(optimizer, dims)
        if mixed is not None:
            kind, mark = type(optimizer).__name__, _mark_of(mixed, self)
            raise _cut_matrices(optimizer, kind, [mark.name] if mark else [])
        self._seen[optimizer] = len(parameters)


def _mark_gradients(
    shards: Sequence[ParamShard | LocalParams], complete: Callable[[Pending, str], Tensor]
) -> None:
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
        origin = ShardGroups(
            [one for one in over if one is not None],
            model_groups,
            frozenset(i for i in range(len(shard.plan.names)) if layout.is_entire(i)),
            complete,
        )
        if isinstance(shard, ParamShard):
            shard.origin = origin
        elif origin.has_peers and shard.plan.is_trainable:
            shard.after_gradients(partial(_mark_gradient, origin))


def _mark_gradient(origin: ShardGroups, index: int, parameter: Tensor) -> None:
    """Ranks that hold other parameters count in a check for overflow, and in a norm if spread."""
    if type(parameter.grad) is Tensor:
        parameter.grad = mark_shard(parameter.grad, origin, index)


def _check_state(optimizer: Optimizer, parameter: Tensor, mark: _ShardMark | None) -> None:
    """State was not loaded from an unsharded model's, before hooks were there to refuse it."""
    for key, value in optimizer.state.get(parameter, {}).items():
        is_of_shard = not isinstance(value, Tensor) or value.shape in (parameter.shape, ())
        if mark is not None and not is_of_shard and tuple(value.shape) == mark.shape:
            raise ConfigError(
                f"step of {type(optimizer).__name__}",
                found=f"{key} of {mark.name!r} is that of the whole parameter: {mark.shape}",
                why=f"This rank has a shard of it, of shape {tuple(parameter.shape)}.",
                fix="Call load_checkpoint with optimizer_shard_views(sharded, optimizer).",
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


def _refuse_shards(guards: Guards, asked: str, fix: str, whose: object, *_: Any) -> None:
    """A hook before state of a module or an optimizer is taken or loaded."""
    if not guards.allows_shards:
        raise ConfigError(
            asked.format(type(whose).__name__),
            found="this rank's shards of the parameters; the rest is on other ranks",
            why="One rank's file would pass for the whole model, and a shard for a parameter.",
            fix=fix,
        )


def _refuse_copy(what: str, _memo: object = None) -> NoReturn:
    raise ConfigError(
        f"copy.deepcopy of {what}",
        found="this rank's shard of flat buffers, which belong to the model it is a copy of",
        why="The copy would be no part of a model, nor a whole one.",
        fix="Copy the model before fully_shard, or keep shard.detach().clone() for each of "
        "sharded.parameters(): averages of shards are shards of the average.",
    )


def _refuse_pickle(what: str, _protocol: object = None) -> NoReturn:
    raise ConfigError(
        f"pickle or torch.save of {what}",
        found="this rank's shards of the parameters; the rest is on other ranks",
        why="One rank's file would pass for the whole model.",
        fix="Save sharded.full_state_dict(), which all ranks call; or save_checkpoint.",
    )


def _refuse_view(name: str, *_shape: object, **_options: object) -> NoReturn:
    raise ConfigError(
        f"view of parameter {name!r}, as in nn.utils.parameters_to_vector",
        found="this rank's shard of it; the rest is on other ranks",
        why="The vector would be that of one rank's shards.",
        fix="Take sharded.full_state_dict(), on all ranks; or shard.detach().view() of the shard.",
    )


class _RefusesDdp:
    """Names of parameters that DistributedDataParallel should ignore: asking is an error."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "DistributedDataParallel of a sharded model",
            found="parameters of which each rank holds another shard",
            why="It would send rank 0's shards to all ranks, and reduce gradients a second time.",
            fix="Call the sharded model itself; for replicas of shards pass Roles(replicate=...).",
        )


def _cut_matrices(optimizer: Optimizer, kind: str, names: Sequence[str]) -> UnsupportedError:
    """An optimizer for whole matrices has parameters that are cut."""
    return UnsupportedError(
        f"step of {type(optimizer).__name__}",
        found=f"shards of parameters on each rank: {', '.join(names[:4])}",
        why=f"{kind} looks at several elements at once, or at their number, and would see "
        "those of this rank.",
        fix="Use an elementwise optimizer (SGD, Adam, AdamW, ...), or put the parameters "
        "into a scope whose groups have one rank, where they are entire.",
    )
