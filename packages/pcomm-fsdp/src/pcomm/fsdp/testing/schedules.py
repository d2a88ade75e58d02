"""Marks, plans and schedules without a model, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pcomm.core.groups.group import Group
from pcomm.fsdp.analysis.simulated import Costs
from pcomm.fsdp.plan.flat_layout import FlatLayout
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.compiler import compile_schedule
from pcomm.fsdp.runtime.schedule import Mark, Owed, Schedule, scheduled_group
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles

__all__ = ["PlannedGroup", "chain", "chain_costs", "plan_of", "step_of"]


class PlannedGroup(Group):
    """A group with any object as its communicator, for plans, which only compare communicators.

    Args:
        name: Axes along which the group runs.
        ranks: Global ranks, ascending; this process is the first one.
        communicator: Any object, in place of a communicator.
        role: Role of the group.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], communicator: object, *, role: str = ""
    ) -> None:
        super().__init__(name, ranks, None, role=role)
        self._stand_in: Any = communicator

    @property
    def process_group(self) -> Any:
        """The object in place of a communicator."""
        return self._stand_in


def chain(num_units: int) -> list[Mark]:
    """Marks of units `b0`, `b1`, ... in a row, in a root that computes nothing itself."""
    names = [f"b{i}" for i in range(num_units)]
    marks = [Mark("use", ROOT, "forward")]
    for name in names:
        marks += [Mark("use", name, "forward"), Mark("done", name, "forward")]
    marks += [Mark("done", ROOT, "forward"), Mark("use", ROOT, "backward")]
    for name in reversed(names):
        marks += [Mark("use", name, "backward"), Mark("done", name, "backward")]
    return [*marks, Mark("done", ROOT, "backward"), Mark("end", ROOT, "backward")]


def chain_costs(num_units: int, forward_s: float, backward_s: float) -> Costs:
    """Seconds of each unit of `chain`."""
    names = [f"b{i}" for i in range(num_units)]
    return Costs(
        dict.fromkeys(names, forward_s) | {ROOT: 0.0},
        dict.fromkeys(names, backward_s) | {ROOT: 0.0},
    )


def plan_of(
    unit: str,
    roles: Roles,
    *,
    scope: str = "",
    elements: int = 640,
    reshard: ReshardPolicy | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> GroupPlan:
    """The plan of one parameter of a unit, a row of fp32 numbers that is cut anywhere.

    Args:
        unit: Its name; the parameter group is called `UNIT.w`, in a scope `UNIT.w/SCOPE`.
        roles: Groups of the scope.
        scope: Its name, empty for the model's own.
        elements: Length of the parameter.
        reshard: Time until which parameters and gradients stay unsharded; None for the default.
        reduce_dtype: Dtype of unsharded gradients.
    """
    size = roles.gather.size
    return GroupPlan(
        name=f"{unit}.w/{scope}" if scope else f"{unit}.w",
        unit=unit,
        scope=scope,
        names=(f"{unit}.w",),
        gather=roles.gather,
        reduce=roles.reduce,
        replicate=roles.replicate,
        spread=None,
        divisor=1.0,
        param_dtype=torch.float32,
        reduce_dtype=reduce_dtype,
        main_dtype=torch.float32,
        is_trainable=True,
        reshard=reshard or ReshardPolicy(),
        layout=FlatLayout(((elements,),), (0,), -(-elements // size), size, True),
    )


def step_of(
    marks: Sequence[Mark],
    plans: Sequence[GroupPlan],
    *,
    micro_batches: int = 1,
    prefetch: int = 1,
    inflight: int = 2,
) -> list[Schedule]:
    """The schedules of a step, as the engine compiles them.

    Args:
        marks: Marks of each micro-batch.
        plans: Plans of all parameter groups.
        micro_batches: Number of micro-batches of the step.
        prefetch: Units gathered ahead.
        inflight: Reduces in flight while the next gradients are computed.
    """
    schedules: list[Schedule] = []
    gathered: frozenset[str] = frozenset()
    owed = Owed()
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        schedules.append(
            compile_schedule(
                marks,
                [scheduled_group(plan, is_last=is_last) for plan in plans],
                prefetch=prefetch,
                prefetch_bytes=None,
                inflight_reduce=inflight,
                gathered=gathered,
                owed=owed,
                is_last=is_last,
            )
        )
        gathered, owed = schedules[-1].gathered_at_end, schedules[-1].owed_at_end
    return schedules
