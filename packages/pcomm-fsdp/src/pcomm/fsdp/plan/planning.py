"""From units and scopes to the plan of each parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pcomm.core.errors import ConfigError
from pcomm.fsdp.plan.flat_layout import plan_flat_layout
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Member, UnitModules
from pcomm.fsdp.settings.policy import CommPolicy, Precision
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Scope

__all__ = ["PlannedGroup", "plan_groups"]

# Kernels on CUDA load 16 bytes at a time.
_ALIGNMENT_BYTES = 16


class PlannedGroup(NamedTuple):
    """A plan and the parameters it is for, in the same order."""

    plan: GroupPlan
    members: list[Member]


def plan_groups(
    units: Sequence[UnitModules],
    default: Scope,
    scopes: Mapping[str, Scope],
    comm: CommPolicy,
    precision: Precision,
) -> list[PlannedGroup]:
    """One plan for each unit, scope, dtype and kind (trained or frozen). Local.

    Args:
        units: The result of `find_units`.
        default: The scope of parameters that no other one selects.
        scopes: Scopes by name; the first that selects a parameter has it.
        comm: Padding, and the separation of gathers and reduces.
        precision: Number formats of scopes that have none of their own.

    Raises:
        ConfigError: A scope that selects nothing, a divisor that is no positive number, or a
            parameter that is no floating-point number.
    """
    counts = dict.fromkeys(scopes, 0)
    planned: list[PlannedGroup] = []
    for unit in units:
        split: dict[tuple[str, torch.dtype, bool], list[Member]] = {}
        for member in unit.members:
            parameter = member.parameter
            scope = next((n for n, s in scopes.items() if s.selects(member.name, parameter)), "")
            if scope:
                counts[scope] += 1
            _check_dtype(member)
            key = scope, parameter.dtype, parameter.requires_grad
            split.setdefault(key, []).append(member)
        for (scope, dtype, is_trainable), members in split.items():
            name = _name(unit.name, scope, dtype, is_trainable, list(split))
            chosen = scopes.get(scope, default)
            plan = _plan(
                name, unit, scope, chosen, default, members, dtype, is_trainable, comm, precision
            )
            planned.append(PlannedGroup(plan, members))
    empty = [name for name, count in counts.items() if not count]
    if empty:
        raise ConfigError(
            f"fully_shard: scopes {', '.join(empty)}",
            found="no parameter of the model that they select",
            why="A scope without parameters is most likely a misspelt name.",
            fix="Correct `selects`, which gets the parameter's name in the model, or drop it.",
        )
    return planned


def _plan(
    name: str,
    unit: UnitModules,
    scope: str,
    chosen: Scope,
    default: Scope,
    members: Sequence[Member],
    dtype: torch.dtype,
    is_trainable: bool,
    comm: CommPolicy,
    precision: Precision,
) -> GroupPlan:
    roles, precision = chosen.roles, chosen.precision or precision
    main_dtype = precision.main_dtype or dtype
    param_dtype = precision.param_dtype or main_dtype
    layout = plan_flat_layout(
        [tuple(member.parameter.shape) for member in members],
        roles.gather.size,
        alignment=max(1, _ALIGNMENT_BYTES // param_dtype.itemsize),
        max_padding=comm.max_padding,
    )
    replicate = roles.replicate
    return GroupPlan(
        name=name,
        unit=unit.name,
        scope=scope,
        names=tuple(member.name for member in members),
        gather=roles.gather,
        reduce=roles.gather if comm.separate == "never" else roles.reduce,
        replicate=None if replicate is None or replicate.size == 1 else replicate,
        spread=chosen.spread,
        divisor=_divisor(scope, chosen, default),
        param_dtype=param_dtype,
        reduce_dtype=precision.reduce_dtype or param_dtype,
        main_dtype=main_dtype,
        is_trainable=is_trainable,
        reshard=chosen.reshard or default.reshard or ReshardPolicy(),
        layout=layout,
    )


def _divisor(scope: str, chosen: Scope, default: Scope) -> float:
    for one in (chosen, default):
        if one.divisor is not None:
            if not one.divisor > 0:
                raise ConfigError(
                    f"fully_shard: divisor {one.divisor!r} of scope {scope!r}",
                    found="a number that is not positive",
                    why="The summed gradient is divided by it.",
                    fix="Leave it out for the mean over ranks, or pass 1 for the sum.",
                )
            return float(one.divisor)
    return float(default.roles.num_ranks)


def _name(
    unit: str,
    scope: str,
    dtype: torch.dtype,
    is_trainable: bool,
    keys: Sequence[tuple[str, torch.dtype, bool]],
) -> str:
    """The unit's name, and what tells this group from the others of the unit."""
    marks = [scope] if scope else []
    if len({key[1] for key in keys}) > 1:
        marks.append(str(dtype).removeprefix("torch."))
    if not is_trainable and len({key[2] for key in keys}) > 1:
        marks.append("frozen")
    return "/".join([unit, *marks])


def _check_dtype(member: Member) -> None:
    if not member.parameter.dtype.is_floating_point:
        raise ConfigError(
            f"fully_shard: parameter {member.name!r}",
            found=f"dtype {member.parameter.dtype}",
            why="Parameters are converted between floating-point formats, and their gradients too.",
            fix="Keep what is no floating-point number in a buffer.",
        )
