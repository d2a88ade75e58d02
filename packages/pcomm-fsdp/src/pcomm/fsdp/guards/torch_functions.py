"""Torch's functions around a sharded model that would take this rank's parts for the whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.fsdp.guards.shard_gradient import GradientOrigin
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.local_group import LocalGroup

__all__ = ["Guards"]

# fmt: off
_WHOLE_MATRIX = frozenset((
    "Adafactor", "CAME", "DistributedShampoo", "GaLoreAdafactor", "GaLoreAdamW", "LAMB", "LARS",
    "LBFGS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo", "ZeroRedundancyOptimizer",
))
# fmt: on
"""Classes of optimizers, ours or derived, that look at more than one element at a time."""


@dataclass(frozen=True)
class _Shard:
    """What a part says of itself."""

    name: str
    shape: tuple[int, ...]
    is_entire: bool
    guards: weakref.ReferenceType[Guards]


class Guards:
    """Refuses, on the model and its optimizers, what would be wrong with parts. Local.

    Args:
        model: Its modules hold the parts.
        groups: All parameter groups. Without one that several ranks share, nothing is guarded.
    """

    def __init__(self, model: nn.Module, groups: Sequence[FlatGroup | LocalGroup]) -> None:
        self._allows_parts = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        _mark_gradients(groups)
        cut = [g for g in groups if isinstance(g, FlatGroup) and g.plan.gather.size > 1]
        if not cut:
            return
        for group in cut:
            self._guard_parts(group)
        owners = {module for group in cut for own in group.owners for module, _ in own}
        for module in model.modules():
            if any(inner in owners for inner in module.modules()):
                self._guard_module(module, is_root=module is model)
        hook = register_optimizer_step_pre_hook(partial(_before_step, weakref.ref(self)))
        self._handles.append(hook)
        # The hook is torch's, for all optimizers: it goes with the model.
        weakref.finalize(model, hook.remove).atexit = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within it, state dicts are of this rank's parts. Local."""
        before, self._allows_parts = self._allows_parts, True
        try:
            yield
        finally:
            self._allows_parts = before

    def _guard_parts(self, group: FlatGroup) -> None:
        layout = group.plan.layout
        for index, (name, part) in enumerate(zip(group.plan.names, group.parts, strict=True)):
            shard = _Shard(name, layout.shapes[index], layout.is_entire(index), weakref.ref(self))
            part.pcomm_shard = shard  # type: ignore[attr-defined]
            vars(part)["__deepcopy__"] = partial(_refuse_copy, f"parameter {name!r}")
            vars(part)["__reduce_ex__"] = partial(_refuse_pickle, f"parameter {name!r}")
            vars(part)["view"] = partial(_refuse_view, name)

    def _guard_module(self, module: nn.Module, *, is_root: bool) -> None:
        what = f"a sharded {type(module).__name__}"
        self._handles += [
            module.register_state_dict_pre_hook(partial(_before_state_dict, self)),
            module.register_load_state_dict_pre_hook(partial(_before_load, self)),
        ]
        vars(module).setdefault("__deepcopy__", partial(_refuse_copy, what))
        vars(module)["__reduce_ex__"] = partial(_refuse_pickle, what)
        if is_root:
            # What DistributedDataParallel asks a module for before it sends anything.
            vars(module)["_ddp_params_and_buffers_to_ignore"] = _RefusesDdp()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer of this model fits to parts; before its step, and again if it has grown.

        Raises:
            UnsupportedError: It looks at whole matrices, of which ranks hold parts.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._seen.get(optimizer) == len(parameters):
            return
        for parameter in parameters:
            _check_state(optimizer, parameter, _shard_of(parameter, self))
        shards = [found for p in parameters if (found := _shard_of(p, self)) is not None]
        if shards and optimizer not in self._seen:
            optimizer.register_state_dict_pre_hook(partial(_before_optimizer_state, self))
            optimizer.register_load_state_dict_pre_hook(partial(_before_optimizer_load, self))
        self._seen.setdefault(optimizer, 0)
        cut = [shard.name for shard in shards if not shard.is_entire]
        kinds = {kind.__name__ for kind in type(optimizer).__mro__} & _WHOLE_MATRIX
        if kinds and not cut and any(_shard_of(p, self) and not p.numel() for p in parameters):
            raise UnsupportedError(
                f"step of {type(optimizer).__name__}",
                found="parameters that are entire on another rank, and have no elements here",
                why=f"{min(kinds)} takes means of all elements of a matrix.",
                fix="Give it [p for p in sharded.parameters() if p.numel()].",
            )
        if cut and kinds:
            raise UnsupportedError(
                f"step of {type(optimizer).__name__}",
                found=f"parts of parameters on each rank: {', '.join(cut[:4])}",
                why=f"{min(kinds)} looks at whole matrices, and would see this rank's rows.",
                fix="Use an elementwise optimizer (SGD, Adam, AdamW, ...), or put the parameters "
                "into a scope whose groups have one rank, where they are entire.",
            )
        self._seen[optimizer] = len(parameters)

    def refuse_parts(self, asked: str, fix: str) -> None:
        """Raise, unless within `allowed`."""
        if not self._allows_parts:
            raise ConfigError(
                asked,
                found="this rank's parts of the parameters; the rest is on other ranks",
                why="One rank's file would pass for the whole model, and a part for a parameter.",
                fix=fix,
            )


def _mark_gradients(groups: Sequence[FlatGroup | LocalGroup]) -> None:
    """Tell gradients where their other parts are."""
    distinct: dict[tuple[int, ...], Group] = {}
    for group in groups:
        plan = group.plan
        for one in (plan.gather, plan.replicate, plan.spread):
            if one is not None:
                distinct.setdefault(one.ranks, one)
    everyone = sorted(distinct.values(), key=lambda group: (-group.size, group.name))
    for group in groups:
        over = (group.plan.gather, group.plan.spread)
        layout = group.plan.layout
        origin = GradientOrigin(
            [one for one in over if one is not None],
            everyone,
            frozenset(i for i in range(len(group.plan.names)) if layout.is_entire(i)),
        )
        if isinstance(group, FlatGroup):
            group.origin = origin
        elif origin.has_peers and group.plan.is_trainable:
            group.after_gradients(partial(_mark_gradient, origin))


def _mark_gradient(origin: GradientOrigin, index: int, part: Tensor) -> None:
    """Ranks that hold other parameters count in a check for overflow, and in a norm if spread."""
    if type(part.grad) is Tensor:
        part.grad = origin.mark(part.grad, index)


def _check_state(optimizer: Optimizer, parameter: Tensor, shard: _Shard | None) -> None:
    """State was not loaded from an unsharded model's, before hooks were there to refuse it."""
    for key, value in optimizer.state.get(parameter, {}).items():
        is_of_part = not isinstance(value, Tensor) or value.shape in (parameter.shape, ())
        if shard is not None and not is_of_part and tuple(value.shape) == shard.shape:
            raise ConfigError(
                f"step of {type(optimizer).__name__}",
                found=f"{key} of {shard.name!r} is that of the whole parameter: {shard.shape}",
                why=f"This rank has a part of it, of shape {tuple(parameter.shape)}.",
                fix="Call load_checkpoint with optimizer_regions(sharded, optimizer).",
            )


def _shard_of(parameter: Any, guards: Guards) -> _Shard | None:
    shard = getattr(parameter, "pcomm_shard", None)
    return shard if isinstance(shard, _Shard) and shard.guards() is guards else None


# -- hooks: what torch calls -----------------------------------------------------------------


def _before_step(guards: weakref.ReferenceType[Guards], optimizer: Optimizer, *_: Any) -> None:
    alive = guards()
    if alive is not None:
        alive.check_optimizer(optimizer)


def _before_state_dict(guards: Guards, module: nn.Module, *_: Any) -> None:
    guards.refuse_parts(
        f"state_dict() of a sharded {type(module).__name__}",
        "Call sharded.full_state_dict() on all ranks, and save it on one (torch.save, "
        "save_pretrained(state_dict=...)); or save_checkpoint of model_regions(sharded). "
        "Within sharded.as_parts() it is this rank's parts.",
    )


def _before_load(guards: Guards, module: nn.Module, *_: Any) -> None:
    guards.refuse_parts(
        f"load_state_dict() of a sharded {type(module).__name__}",
        "Call sharded.load_full_state_dict(state) with the unsharded state dict on all ranks; or "
        "load_checkpoint with model_regions(sharded). Within sharded.as_parts() it takes parts.",
    )


def _before_optimizer_state(guards: Guards, optimizer: Optimizer) -> None:
    guards.refuse_parts(
        f"state_dict() of {type(optimizer).__name__} of a sharded model",
        "Call save_checkpoint with optimizer_regions(sharded, optimizer) on all ranks. Within "
        "sharded.as_parts() it is that of this rank's parts.",
    )


def _before_optimizer_load(guards: Guards, optimizer: Optimizer, *_: Any) -> None:
    guards.refuse_parts(
        f"load_state_dict() of {type(optimizer).__name__} of a sharded model",
        "Call load_checkpoint with optimizer_regions(sharded, optimizer) on all ranks. Within "
        "sharded.as_parts() it takes the state of this rank's parts.",
    )


def _refuse_copy(what: str, _memo: object = None) -> NoReturn:
    raise ConfigError(
        f"copy.deepcopy of {what}",
        found="this rank's part of flat buffers, which belong to the model it is a copy of",
        why="The copy would be no part of a model, nor a whole one.",
        fix="Copy the model before fully_shard, or keep part.detach().clone() for each of "
        "sharded.parameters(): averages of parts are parts of the average.",
    )


def _refuse_pickle(what: str, _protocol: object = None) -> NoReturn:
    raise ConfigError(
        f"pickle or torch.save of {what}",
        found="this rank's parts of the parameters; the rest is on other ranks",
        why="One rank's file would pass for the whole model.",
        fix="Save sharded.full_state_dict(), which all ranks call; or save_checkpoint.",
    )


def _refuse_view(name: str, *_shape: object, **_options: object) -> NoReturn:
    raise ConfigError(
        f"view of parameter {name!r}, as in nn.utils.parameters_to_vector",
        found="this rank's part of it; the rest is on other ranks",
        why="The vector would be that of one rank's parts.",
        fix="Take sharded.full_state_dict(), on all ranks; or part.detach().view() of the part.",
    )


class _RefusesDdp:
    """Names of parameters that DistributedDataParallel should ignore: asking is an error."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "DistributedDataParallel of a sharded model",
            found="parameters of which each rank holds another part",
            why="It would send rank 0's parts to all ranks, and reduce gradients a second time.",
            fix="Call the sharded model itself; for replicas of shards pass Roles(replicate=...).",
        )
