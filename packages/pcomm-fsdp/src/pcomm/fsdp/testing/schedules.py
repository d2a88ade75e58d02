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
from pcomm.fsdp.runtime.schedule import Buffer, Mark, Owed, Schedule
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles

__all__ = ["PlannedGroup", "chain", "chain_costs", "plan_of", "step_of"]


class PlannedGroup(Group):
    """A group whose communicator is any object, for plans, which only ask which one it is.

    Args:
        name: Axes along which the group runs.
        ranks: Global ranks, ascending; this process is the first one.
        communicator: What stands for it.
        role: What it is for.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], communicator: object, *, role: str = ""
    ) -> None:
        super().__init__(name, ranks, None, role=role)
        self._stand_in: Any = communicator

    @property
    def process_group(self) -> Any:
        """What stands for it."""
        return self._stand_in


def chain(num_units: int) -> list[Mark]:
    """What units `b0`, `b1`, ... in a row do, in a root that computes nothing itself."""
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
    shard: ReshardPolicy | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> GroupPlan:
    """The plan of one parameter of a unit, a row of fp32 numbers that is cut anywhere.

    Args:
        unit: Its name; the parameter group is called `UNIT.w`, in a scope `UNIT.w/SCOPE`.
        roles: Groups of the scope.
        scope: Its name, empty for the model's own.
        elements: Length of the parameter.
        shard: What is kept whole for how long; None for the default.
        reduce_dtype: Of whole gradients.
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
        shard=shard or ReshardPolicy(),
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
        marks: Of each micro-batch.
        plans: Of all parameter groups.
        micro_batches: Of the step.
        prefetch: Units gathered ahead.
        inflight: Reduces on their way while the next gradients are computed.
    """
    schedules: list[Schedule] = []
    gathered: frozenset[str] = frozenset()
    owed = Owed()
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        buffers = []
        for plan in plans:
            reduces = is_last or plan.shard.reduce == "micro_batch"
            replicates = reduces and is_last and plan.num_replicas > 1
            size, keep = plan.gathered_bytes, plan.shard.keep
            buffers.append(Buffer(plan.name, plan.unit, size, keep, reduces, replicates))
        schedules.append(
            compile_schedule(
                marks,
                buffers,
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
