"""Sharding a model: from modules and groups to plans, buffers and hooks."""

from __future__ import annotations

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
from pcomm.core.memory.pools import PoolRegistry
from pcomm.fsdp.full_state import materialise
from pcomm.fsdp.plan.checks import check_model, check_settings
from pcomm.fsdp.plan.group_plan import PlannedGroup, plan_groups
from pcomm.fsdp.plan.unit_choice import choose_units
from pcomm.fsdp.plan.units import ROOT, UnitModules, Units, find_units
from pcomm.fsdp.registered_memory import PooledMemory, register_memory
from pcomm.fsdp.runtime.fsdp_runtime import FsdpRuntime, Unit
from pcomm.fsdp.runtime.hooks import install_hooks
from pcomm.fsdp.runtime.param_group import BufferPool, ParamGroup
from pcomm.fsdp.runtime.peers import FailureAwareWait, Peers
from pcomm.fsdp.runtime.shards import LocalParams
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles, Scope, roles_from
from pcomm.fsdp.sharded import Sharded

if TYPE_CHECKING:
    from pcomm.fsdp.separation import Separation

__all__ = ["fully_shard"]

_log = logging.getLogger("pcomm.fsdp")

_ZERO3, _COMM, _PRECISION = ReshardPolicy.zero3(), CommPolicy(), Precision()

# Units of the model, groups of its parameters, and the device of the shards.
_Planned: TypeAlias = tuple[list[UnitModules], list[PlannedGroup], torch.device]


def fully_shard(
    model: nn.Module,
    roles: Roles | DeviceMesh,
    *,
    units: Units | None = None,
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
            the root, gathered for the whole step. None for what a model of transformers names in
            `_no_split_modules`, or the blocks that any other model repeats; a log line and the
            report say which.
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
    choice = ""
    if units is None and isinstance(model, nn.Module):
        units, choice = choose_units(model)
        _log.info("%s: %s", type(model).__name__, choice)
    chosen: Units = () if units is None else units
    groups = [roles, *(scope.roles for scope in scopes.values())]
    peers = Peers([g for r in groups for g in (r.gather, r.replicate) if g is not None])

    def plan() -> _Planned:
        check_settings(reshard, comm, precision)
        target = check_model(model, roles, scopes, entry_points, device)
        found = find_units(model, chosen)
        default = Scope(lambda *_: True, roles, divisor, reshard)
        return found, plan_groups(found, default, scopes, comm, precision), target

    found, planned, target = _agree(plan, peers, comm, has_pools=pools is not None)
    separations: list[Separation] = []
    if comm.separate == "auto":
        from pcomm.fsdp.separation import decide_separation

        planned, separations = decide_separation(planned, target)
    memory: PooledMemory | None = None
    if pools is not None:
        memory = register_memory(pools, [one.plan for one in planned], comm, peers, target)
        planned = [PlannedGroup(memory.named_in(plan), members) for plan, members in planned]
    _warn_of_cut_rows(planned)
    pool, wait = BufferPool(target), FailureAwareWait()
    built = [_build(one, target, pool, wait, memory) for one in planned]
    shards = [one.shard if isinstance(one, ParamGroup) else one for one in built]
    materialise(model, shards, target, initialise)
    running = _running(found, built, precision)
    runtime = FsdpRuntime(running, shards, comm, peers, pool, wait)
    if any(unit.groups for unit in running):
        install_hooks(runtime, running[0], running[1:], entry_points)
    _close_with(groups, runtime)
    return Sharded(model, runtime, _first_names(model, planned), separations, memory, choice)


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

    def lines(group: Group) -> list[str]:
        """Text that the ranks of a group must have in common."""
        if error is not None:
            # Of settings that are none, no text can be made.
            return []
        common = [f"{replace(comm, separate='always')}, memory pools: {has_pools}"]
        for plan, _ in planned:
            if plan.gather.ranks == group.ranks:
                common += plan.lines()
            elif plan.replicate is not None and plan.replicate.ranks == group.ranks:
                common += [*plan.lines(), f"place {plan.rank} of {plan.gather.size}"]
            else:
                common.append(f"{plan.name} is not for this group")
        return common

    peers.agree("fully_shard", lines, error=error)
    return found, planned, target


def _warn_of_cut_rows(planned: Sequence[PlannedGroup]) -> None:
    """Tell for which parameters an optimizer sees no rows."""
    cut = [name for one in planned for name in one.plan.cut_names]
    if cut:
        _log.warning(
            "cut inside rows, and 1-D for the optimizer: %s. A larger CommPolicy.max_padding, the "
            "fraction of memory that may be padding, keeps rows whole",
            ", ".join(cut),
        )


def _build(
    planned: PlannedGroup,
    device: torch.device,
    pool: BufferPool,
    wait: FailureAwareWait,
    memory: PooledMemory | None,
) -> ParamGroup | LocalParams:
    plan = planned.plan
    owners = [member.owners for member in planned.members]
    originals = [member.parameter for member in planned.members]
    if plan.is_local:
        return LocalParams(plan, owners, originals, device)
    fill = memory.fill(plan) if memory else None
    own_pool = memory.gradients(plan, device) if memory else None
    return ParamGroup(plan, owners, originals, device, pool=own_pool or pool, wait=wait, fill=fill)


def _running(
    found: Sequence[UnitModules], groups: Sequence[ParamGroup | LocalParams], precision: Precision
) -> list[Unit]:
    """The units that communicate or convert, and the root."""
    active: dict[str, list[ParamGroup]] = {unit.name: [] for unit in found}
    for group in groups:
        if isinstance(group, ParamGroup):
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


def _close_with(roles: Sequence[Roles], runtime: FsdpRuntime) -> None:
    """Close the runtime with the first of its groups that closes."""
    # Weakly, so that a model that is dropped before goes at once.
    reference = weakref.ref(runtime)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    distinct = {
        id(group): group for r in roles for group in (r.gather, r.reduce, r.replicate) if group
    }
    for group in distinct.values():
        runtime.at_end(group.before_close(close, is_local=True))
