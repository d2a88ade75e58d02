"""Sharding a model: from modules and groups to plans, buffers and hooks."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pcomm.core.errors import PcommError
from pcomm.core.groups.group import Group
from pcomm.core.memory.pools.registry import PoolRegistry
from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.memory.registered import PooledMemory, register_memory
from pcomm.fsdp.plan.checks import (
    check_entry_points,
    check_memory,
    check_no_hooks,
    check_no_optimizer,
    check_not_sharded,
    check_plain,
    check_roles,
    check_settings,
    device_of,
)
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.planning import PlannedGroup, plan_groups
from pcomm.fsdp.plan.units import ROOT, UnitModules, Units, find_units
from pcomm.fsdp.runtime.engine import Engine
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.hooks import install_hooks
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.peers import Peers
from pcomm.fsdp.runtime.unit import Unit
from pcomm.fsdp.runtime.wait import FailureAwareWait
from pcomm.fsdp.settings.policy import CommPolicy, Precision
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles, Scope, roles_from
from pcomm.fsdp.sharded import Sharded
from pcomm.fsdp.state.materialise import materialise

if TYPE_CHECKING:
    from pcomm.fsdp.analysis.separation import Separation

__all__ = ["fully_shard"]

_log = logging.getLogger("pcomm.fsdp")

_ZERO3, _COMM, _PRECISION = ReshardPolicy.zero3(), CommPolicy(), Precision()

# Units of the model, groups of its parameters, and the device of the shards.
_Planned: TypeAlias = tuple[list[UnitModules], list[PlannedGroup], torch.device]


def fully_shard(
    model: nn.Module,
    roles: Roles | DeviceMesh,
    *,
    units: Units,
    scopes: Mapping[str, Scope] | None = None,
    reshard: ReshardPolicy = _ZERO3,
    comm: CommPolicy = _COMM,
    precision: Precision = _PRECISION,
    divisor: float | None = None,
    entry_points: Sequence[str] = ("forward",),
    device: torch.device | str | None = None,
    initialise: Callable[[nn.Module], None] | None = None,
    pools: PoolRegistry | None = None,
) -> Sharded:
    """Shard a model's parameters, in place, over the ranks of its groups.

    Collective over all groups. Every rank passes the same model, and keeps its shard of the values
    that it has. Errors are raised on all ranks before anything is sent. On one rank, without a
    change of dtype, parameters stay as they are and nothing is hooked.

    Args:
        model: A model with all its parameters on one device, or on the meta device.
        roles: The groups of all parameters that no scope selects. In a DeviceMesh the last
            dimension shards, and the first of two replicates; it has one communicator for both
            gathers and reduces.
        units: Modules, or classes of modules, that gather their parameters together; usually the
            block of the model. One class may be passed without a list. What is outside of them is
            the root, gathered for the whole step.
        scopes: Parameters with groups of their own, by a name for them.
        reshard: Time until which parameters and gradients stay unsharded.
        comm: Communication over time.
        precision: Number formats.
        divisor: Number that gradients are divided by after they are summed. None for the number of
            ranks of `roles`: the mean over ranks. 1 for a loss that is divided by the global batch.
        entry_points: Methods of the model that begin a forward.
        device: Device of the shards; needed for a model on the meta device.
        initialise: Called with each module that has parameters of its own on the meta device, once
            they are on `device`, in the order of `model.modules()`; None for
            `module.reset_parameters()`. All ranks must draw the same random numbers.
        pools: Registers memory for unsharded parameters and gradients with the groups that send
            them; None for ordinary memory. All ranks of its control group shard the model
            together. As much as a step can need is reserved now and stays; when the registry's
            groups close, it waits for the device and takes the memory from their communicators.

    Returns:
        The sharded model: the parameters for an optimizer, state dicts, norms and reports.

    Raises:
        UnsupportedError: Memory could not be registered; what was is undone.
        ConfigError: Units, devices, dtypes or settings that cannot be used, or an optimizer that
            holds a parameter already.
        TopologyError: Groups that do not fit together.
        PeerError: Another rank has one of these errors.
        DivergenceError: Ranks shard different models, or the same in different ways.
    """
    scopes, roles = dict(scopes or {}), roles_from(roles)
    groups = [roles, *(scope.roles for scope in scopes.values())]
    peers = Peers([g for r in groups for g in (r.gather, r.replicate) if g is not None])

    def plan() -> _Planned:
        check_settings(
            {
                "reshard": (reshard, ReshardPolicy),
                "comm": (comm, CommPolicy),
                "precision": (precision, Precision),
            }
        )
        parameters = _check(model, roles, scopes, entry_points)
        target = device_of(parameters, device)
        found = find_units(model, units)
        default = Scope(lambda *_: True, roles, divisor, reshard)
        return found, plan_groups(found, default, scopes, comm, precision), target

    found, planned, target = _agree(plan, peers, comm, has_pools=pools is not None)
    planned, separations = _decide_separation(planned, comm, target)
    planned, memory = _register(planned, pools, comm, peers, target)
    _warn_of_cut_rows(planned)
    pool, wait = BufferPool(target), FailureAwareWait()
    built = [_build(one, target, pool, wait, memory) for one in planned]
    shards = [one.shard if isinstance(one, FlatGroup) else one for one in built]
    materialise(model, shards, target, initialise)
    running = _running(found, built, precision)
    engine = Engine(running, shards, comm, peers, pool)
    wait.peer_failure = engine.peer_failure
    if any(unit.groups for unit in running):
        install_hooks(engine, running[0], running[1:], entry_points)
    _close_with(groups, engine)
    return Sharded(model, engine, _first_names(model, planned), separations, memory)


def _register(
    planned: list[PlannedGroup],
    pools: PoolRegistry | None,
    comm: CommPolicy,
    peers: Peers,
    device: torch.device,
) -> tuple[list[PlannedGroup], PooledMemory | None]:
    """Reserve what a step needs in registered memory, if there are pools. Collective."""
    if pools is None:
        return planned, None
    memory = register_memory(pools, [one.plan for one in planned], comm, peers, device)
    return [PlannedGroup(memory.named_in(p), members) for p, members in planned], memory


def _warn_of_cut_rows(planned: Sequence[PlannedGroup]) -> None:
    """Tell for which parameters an optimizer sees no rows."""
    cut = [name for one in planned for name in one.plan.cut_names]
    if cut:
        _log.warning(
            "cut inside rows, and 1-D for the optimizer: %s. A larger max_padding keeps rows whole",
            ", ".join(cut),
        )


def _close_with(roles: Sequence[Roles], engine: Engine) -> None:
    """Close the engine with the first of its groups that closes."""
    close = functools.partial(_close, weakref.ref(engine))
    distinct = {
        id(group): group for r in roles for group in (r.gather, r.reduce, r.replicate) if group
    }
    for group in distinct.values():
        engine.at_end(group.before_close(close, is_local=True))


def _close(engine: weakref.ref[Engine]) -> None:
    # Weakly, so that a model that is dropped before goes at once.
    found = engine()
    if found is not None:
        found.close()


def _check(
    model: nn.Module, roles: Roles, scopes: Mapping[str, Scope], entry_points: Sequence[str]
) -> dict[str, nn.Parameter]:
    """Refuse what cannot be sharded; returns the model's parameters."""
    for name, scope_roles in (("", roles), *((n, s.roles) for n, s in scopes.items())):
        check_roles(name, scope_roles)
    parameters = dict(model.named_parameters())
    check_not_sharded(parameters)
    check_plain(parameters)
    check_no_optimizer(parameters)
    check_no_hooks(parameters)
    check_memory(model, parameters)
    check_entry_points(model, entry_points)
    return parameters


def _agree(
    plan: Callable[[], _Planned], peers: Peers, comm: CommPolicy, *, has_pools: bool
) -> _Planned:
    """Units, plans and device, which are the same on all ranks, or an error on all. Collective."""
    error: PcommError | None = None
    found: list[UnitModules] = []
    planned: list[PlannedGroup] = []
    target = torch.device("cpu")
    try:
        found, planned, target = plan()
    except PcommError as problem:
        error = problem
    lines = _lines([one.plan for one in planned], comm, has_pools=has_pools)
    peers.agree("fully_shard", lines, error=error)
    return found, planned, target


def _decide_separation(
    planned: list[PlannedGroup], comm: CommPolicy, device: torch.device
) -> tuple[list[PlannedGroup], list[Separation]]:
    """With `auto`, measure each pair of groups once, and share where separation does not pay."""
    if comm.separate != "auto":
        return planned, []
    from pcomm.fsdp.analysis.separation import measure_separation

    largest: dict[tuple[int, int], GroupPlan] = {}
    for plan, _ in planned:
        pair = id(plan.gather.process_group), id(plan.reduce.process_group)
        if plan.gather.size > 1 and plan.is_trainable and pair[0] != pair[1]:
            other = largest.setdefault(pair, plan)
            largest[pair] = max(plan, other, key=lambda p: p.layout.length)
    found = {
        pair: measure_separation(
            plan.gather,
            plan.reduce,
            num_elements=plan.layout.length,
            gather_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            device=device,
        )
        for pair, plan in largest.items()
    }
    decided = []
    for plan, members in planned:
        separation = found.get((id(plan.gather.process_group), id(plan.reduce.process_group)))
        shares = separation is not None and not separation.pays
        decided.append(PlannedGroup(replace(plan, reduce=plan.gather) if shares else plan, members))
    return decided, list(found.values())


def _build(
    planned: PlannedGroup,
    device: torch.device,
    pool: BufferPool,
    wait: FailureAwareWait,
    memory: PooledMemory | None,
) -> FlatGroup | LocalParams:
    plan = planned.plan
    owners = [member.owners for member in planned.members]
    originals = [member.parameter for member in planned.members]
    if plan.is_local:
        return LocalParams(plan, owners, originals, device)
    fill = memory.fill(plan) if memory else None
    own_pool = memory.gradients(plan, device) if memory else None
    return FlatGroup(plan, owners, originals, device, pool=own_pool or pool, wait=wait, fill=fill)


def _running(
    found: Sequence[UnitModules], groups: Sequence[FlatGroup | LocalParams], precision: Precision
) -> list[Unit]:
    """The units that communicate or convert, and the root."""
    active: dict[str, list[FlatGroup]] = {unit.name: [] for unit in found}
    for group in groups:
        if isinstance(group, FlatGroup):
            active[group.plan.unit].append(group)
    input_dtype = precision.param_dtype if precision.casts_inputs else None
    return [
        Unit(unit.name, unit.module, active[unit.name], input_dtype=input_dtype)
        for unit in found
        if active[unit.name] or unit.name == ROOT
    ]


def _first_names(model: nn.Module, planned: Sequence[PlannedGroup]) -> dict[str, str]:
    """For each name of a parameter, in the model's order, its first name."""
    names = {alias: m.name for one in planned for m in one.members for alias in m.aliases}
    return {name: names[name] for name, _ in model.named_parameters(remove_duplicate=False)}


def _lines(
    plans: Sequence[GroupPlan], comm: CommPolicy, *, has_pools: bool
) -> Callable[[Group], list[str]]:
    """Text that the ranks of a group must have in common."""

    def lines(group: Group) -> list[str]:
        found = [f"{replace(comm, separate='always')}, memory pools: {has_pools}"]
        for plan in plans:
            if plan.gather.ranks == group.ranks:
                found += plan.lines()
            elif plan.replicate is not None and plan.replicate.ranks == group.ranks:
                found += [*plan.lines(), f"place {plan.rank} of {plan.gather.size}"]
            else:
                found.append(f"{plan.name} is not for this group")
        return found

    return lines
