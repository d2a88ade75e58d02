"""Events, plans and schedules without a model, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from pcomm.core.groups.group import Group
from pcomm.fsdp.compute_costs import Costs
from pcomm.fsdp.plan.group_plan import FlatLayout, GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import (
    Operation,
    Schedule,
    ScheduledGroup,
    UnitEvent,
    UnreducedGrads,
    compile_schedule,
    scheduled_group,
)
from pcomm.fsdp.settings import Keep, ReshardPolicy, Roles

__all__ = [
    "ChainGroup",
    "Machine",
    "chain",
    "chain_costs",
    "groups_of",
    "plan_of",
    "random_events",
    "step_of",
]


class ChainGroup(Group):
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


def chain(num_units: int) -> list[UnitEvent]:
    """Events of units `b0`, `b1`, ... in a row, in a root that computes nothing itself."""
    names = [f"b{i}" for i in range(num_units)]
    events = [UnitEvent("use", ROOT, "forward")]
    for name in names:
        events += [UnitEvent("use", name, "forward"), UnitEvent("done", name, "forward")]
    events += [UnitEvent("done", ROOT, "forward"), UnitEvent("use", ROOT, "backward")]
    for name in reversed(names):
        events += [UnitEvent("use", name, "backward"), UnitEvent("done", name, "backward")]
    return [*events, UnitEvent("done", ROOT, "backward"), UnitEvent("end", ROOT, "backward")]


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
    events: Sequence[UnitEvent],
    plans: Sequence[GroupPlan],
    *,
    micro_batches: int = 1,
    prefetch: int = 1,
    inflight: int = 2,
) -> list[Schedule]:
    """The schedules of a step, as the runtime compiles them.

    Args:
        events: Events of each micro-batch.
        plans: Plans of all parameter groups.
        micro_batches: Number of micro-batches of the step.
        prefetch: Units gathered ahead.
        inflight: Reduces in flight while the next gradients are computed.
    """
    schedules: list[Schedule] = []
    gathered: frozenset[str] = frozenset()
    unreduced = UnreducedGrads()
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        schedules.append(
            compile_schedule(
                events,
                [scheduled_group(plan, is_last=is_last) for plan in plans],
                prefetch=prefetch,
                prefetch_bytes=None,
                inflight_reduce=inflight,
                gathered=gathered,
                unreduced=unreduced,
                is_last=is_last,
            )
        )
        gathered, unreduced = schedules[-1].gathered_at_end, schedules[-1].unreduced_at_end
    return schedules


def groups_of(
    events: Iterable[UnitEvent],
    keep: Keep = "use",
    *,
    reduces: bool = True,
    all_reduces: bool = False,
    has_replicas: bool = False,
) -> list[ScheduledGroup]:
    """A parameter group of ten bytes for each unit."""
    return [
        ScheduledGroup(f"{u}.w", u, 10, keep, reduces, all_reduces, has_replicas=has_replicas)
        for u in sorted({event.unit for event in events})
    ]


@dataclass
class Machine:
    """Executes steps and refuses what makes no sense.

    Args:
        groups: The parameter groups of all units.
        gathered: Names of those that are gathered before.
    """

    groups: Sequence[ScheduledGroup]
    gathered: set[str] = field(default_factory=set)
    in_flight: set[str] = field(default_factory=set)
    reducing: set[str] = field(default_factory=set)
    all_reducing: set[str] = field(default_factory=set)
    reduced: list[str] = field(default_factory=list)
    most_gathered: int = 0
    most_reducing: int = 0

    @property
    def on_their_way(self) -> set[str]:
        """Groups with a collective that has not been waited for."""
        return self.in_flight | self.reducing | self.all_reducing

    def run(self, steps: Iterable[Operation]) -> None:
        """Take steps, and note how much there is at once beside the root's."""
        for step in steps:
            getattr(self, step.kind)(step)
            live = self.gathered | self.in_flight
            self.most_gathered = max(self.most_gathered, len(live - {f"{ROOT}.w"}))

    def use(self, step: Operation) -> None:
        """The parameters of a unit are there."""
        # What is on its way beside computation; one more is issued before the oldest is ended.
        self.most_reducing = max(self.most_reducing, len(self.reducing))
        for group in self.groups:
            if group.unit == step.name:
                assert group.name in self.gathered, f"{step} without its parameters"

    def done(self, step: Operation) -> None:
        """A unit has ended."""

    end = done

    def gather(self, step: Operation) -> None:
        """It is not there, and not on its way."""
        assert step.name not in self.gathered | self.in_flight
        self.in_flight.add(step.name)

    def wait_gather(self, step: Operation) -> None:
        """It was on its way."""
        self.in_flight.remove(step.name)
        self.gathered.add(step.name)

    def release(self, step: Operation) -> None:
        """It was there."""
        self.gathered.remove(step.name)

    def reduce(self, step: Operation) -> None:
        """No other reduce of the group is on its way."""
        assert step.name not in self.reducing
        self.reducing.add(step.name)
        self.reduced.append(step.name)

    def wait_reduce(self, step: Operation) -> None:
        """What it adds to is not being summed over replicas."""
        assert step.name not in self.all_reducing
        self.reducing.remove(step.name)

    def all_reduce(self, step: Operation) -> None:
        """All gradients are there, and are summed once at a time."""
        assert step.name not in self.reducing | self.all_reducing
        self.all_reducing.add(step.name)

    def wait_all_reduce(self, step: Operation) -> None:
        """It was on its way."""
        self.all_reducing.remove(step.name)


@st.composite
def random_events(draw: st.DrawFn) -> list[UnitEvent]:
    """Units in any order, nested and repeated, some of them without a backward."""
    names = [f"u{i}" for i in range(draw(st.integers(1, 6)))]
    events = [UnitEvent("use", ROOT, "forward")]
    for name in draw(st.lists(st.sampled_from(names), max_size=10)):
        inner = draw(st.sampled_from([*names, ""]))
        events.append(UnitEvent("use", name, "forward"))
        if inner and inner != name:
            events += [UnitEvent("use", inner, "forward"), UnitEvent("done", inner, "forward")]
        events.append(UnitEvent("done", name, "forward"))
    events += [UnitEvent("done", ROOT, "forward"), UnitEvent("use", ROOT, "backward")]
    used = sorted({event.unit for event in events} - {ROOT})
    back = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
    waiting: list[str] = []
    for name in back:
        events.append(UnitEvent("use", name, "backward"))
        waiting.append(name)
        while len(waiting) > 0 and draw(st.booleans()):
            events.append(UnitEvent("done", waiting.pop(), "backward"))
    events += [UnitEvent("done", name, "backward") for name in reversed(waiting)]
    return [*events, UnitEvent("done", ROOT, "backward"), UnitEvent("end", ROOT, "backward")]
