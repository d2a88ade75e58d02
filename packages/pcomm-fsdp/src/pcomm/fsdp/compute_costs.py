"""Seconds that units compute: recorded, averaged, and laid on a schedule, also as a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.simulate.program import Kind, Task
from pcomm.core.trace.events import COMPUTE, Event, queue_of
from pcomm.core.trace.recording import Mark, Recorder
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import Phase, Schedule, UnitEvent

__all__ = ["ComputeRecorder", "Costs", "compute_segments", "program", "queues_of"]


@dataclass(frozen=True)
class Costs:
    """Seconds that units compute, for each of their uses, without the units inside them.

    Args:
        forward_s: Seconds of each unit in forward, by its name.
        backward_s: Seconds of each unit in backward, by its name.
    """

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]

    @classmethod
    def even(cls, schedule: Schedule, *, forward_s: float, backward_s: float) -> Costs:
        """The time of a whole micro-batch, divided evenly over the uses of units."""
        uses = [op for op in schedule.steps if op.kind == "use"]
        names = {op.name for op in uses}
        numbers = Counter(op.phase for op in uses)
        return cls(
            dict.fromkeys(names, forward_s / max(1, numbers["forward"])),
            dict.fromkeys(names, backward_s / max(1, numbers["backward"])),
        )

    @classmethod
    def from_events(cls, events: Iterable[Event], schedule: Schedule, micro_batches: int) -> Costs:
        """Means of the events of `Sharded.recording` over some micro-batches.

        Args:
            events: Recorded events; those named `forward UNIT` and `backward UNIT` count.
            schedule: The schedule of each micro-batch, for the number of uses of each unit.
            micro_batches: Number of micro-batches that were recorded.
        """
        total: dict[tuple[str, str], float] = {}
        for event in events:
            phase, _, unit = event.operation.partition(" ")
            if event.queue == COMPUTE:
                total[phase, unit] = total.get((phase, unit), 0.0) + event.seconds
        uses = Counter((op.phase, op.name) for op in schedule.steps if op.kind == "use")
        forward_s, backward_s = (
            {
                unit: total[of, unit] / (number * micro_batches)
                for (of, unit), number in uses.items()
                if of == phase and (of, unit) in total
            }
            for phase in ("forward", "backward")
        )
        return cls(forward_s, backward_s)

    def of(self, unit: str, phase: Phase) -> float:
        """Seconds of one use.

        Raises:
            ConfigError: The unit has none.
        """
        known = self.forward_s if phase == "forward" else self.backward_s
        if unit not in known:
            raise ConfigError(
                f"Costs: {phase} of unit {unit!r}",
                found=f"seconds of {len(known)} other units",
                why="A unit without a time would look as if communication behind it were exposed.",
                fix="Give every unit its seconds, 0 for one that computes nothing itself.",
            )
        return known[unit]


class ComputeRecorder:
    """Turns what the runtime tells of units into events `forward UNIT` and `backward UNIT`.

    Each segment of computing between two of them is one event, of the innermost unit; the runtime's
    own time there is left out. Where the recorder has no clock of a GPU, that is the time in which
    the host hands work over.

    Args:
        recorder: Recorder that takes the events.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[UnitEvent] = []
        self._start: Mark = 0.0

    def pause(self, unit_event: UnitEvent) -> None:
        """A unit begins or ends something; the runtime takes over."""
        if (unit_event.kind, unit_event.unit, unit_event.phase) == ("use", ROOT, "forward"):
            # Units that are open are of a step that ended with an error.
            self._open.clear()
        if self._open:
            of, recorder = self._open[-1], self._recorder
            name = f"{of.phase} {of.unit}"
            event = Event("", "", name, 0, 0.0, 0.0, recorder.rank, COMPUTE)
            recorder.add_between(event, self._start, recorder.mark())
        if unit_event.kind == "use":
            self._open.append(unit_event)
        elif unit_event.kind == "done":
            self._open.remove(unit_event._replace(kind="use"))

    def resume(self) -> None:
        """The runtime has done what it had to."""
        self._start = self._recorder.mark()


def compute_segments(schedule: Schedule, costs: Costs) -> dict[int, float]:
    """Seconds of computing after each use and done, by the index of that step.

    The innermost unit computes. Its seconds are divided evenly over the segments that other units
    inside it leave.
    """
    open_uses: list[tuple[int, str]] = []
    user: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for place, op in enumerate(schedule.steps):
        if op.kind == "use":
            open_uses.append((place, op.name))
            seconds[place] = costs.of(op.name, op.phase)
        elif op.kind == "done":
            for at in range(len(open_uses) - 1, -1, -1):
                if open_uses[at][1] == op.name:
                    del open_uses[at]
                    break
        if op.kind in ("use", "done") and open_uses:
            user[place] = open_uses[-1][0]
    num_segments = Counter(user.values())
    return {place: seconds[use] / num_segments[use] for place, use in user.items()}


def queues_of(plans: Iterable[GroupPlan]) -> dict[str, str]:
    """The queue of every group, by its key; groups that share a communicator share a queue."""
    by_communicator: dict[int, str] = {}
    queues: dict[str, str] = {}
    for plan in plans:
        for group in (plan.gather, plan.reduce, plan.replicate):
            if group is not None:
                own = queue_of(group.name, group.role)
                if group.process_group is not None:
                    own = by_communicator.setdefault(id(group.process_group), own)
                queues.setdefault(group.key, own)
    return queues


def program(
    schedules: Sequence[Schedule],
    plans: Sequence[GroupPlan],
    costs: Costs,
    *,
    num_shards: int | Mapping[str, int] | None = None,
) -> list[Task]:
    """The steps of one rank in a training step, as tasks for `pcomm.core.simulate`. Local.

    A collective is issued when all that comes before it in the schedule has been computed and
    waited for: a host that computes itself is there only then, and on a GPU its stream waits for
    that of the computation. Copies and sums on the rank itself take no time.

    Tasks are named as steps are: `forward gather blocks.0`, `backward blocks.0`,
    `backward reduce blocks.0`; a second one of a name has ` (2)` behind it.

    Args:
        schedules: The schedule of each micro-batch of the step, in order.
        plans: Plans of all parameter groups; their groups name the queues, as `dp:gather`.
        costs: Seconds of computing.
        num_shards: Number of ranks to predict for in each gather and reduce group, instead of
            those of the plans; padding stays as it is. With scopes, a number for each by its name,
            `""` for the model's own; those left out stay as they are.

    Returns:
        The tasks of every rank that has these plans; `dict.fromkeys(ranks, tasks)` runs them.

    Raises:
        ConfigError: One number for several scopes.
    """
    scopes = dict.fromkeys(plan.scope for plan in plans)
    if isinstance(num_shards, int):
        if len(scopes) > 1:
            raise ConfigError(
                f"program(num_shards={num_shards})",
                found=f"parameters of {len(scopes)} scopes: {', '.join(map(repr, scopes))}",
                why="Groups of another scope, such as that of experts, have another number of "
                "ranks.",
                fix="Give one for each, such as "
                f"num_shards={{{next(iter(scopes))!r}: {num_shards}, ...}}.",
            )
        num_shards = dict.fromkeys(scopes, num_shards)
    writer = _TaskWriter(plans, num_shards or {})
    for schedule in schedules:
        seconds = compute_segments(schedule, costs)
        for place, op in enumerate(schedule.steps):
            if op.is_anchor:
                if op.kind == "use" or seconds.get(place):
                    unit = op.name if op.kind == "use" else f"after {op.name}"
                    writer.compute(f"{op.phase} {unit}", seconds[place])
            elif op.is_blocking:
                writer.wait(op.name)
            elif op.kind != "release":
                writer.issue(op.kind, op.phase, op.name)
    return writer.tasks


class _TaskWriter:
    """Writes tasks, and keeps the tasks that the rank has waited for."""

    def __init__(self, plans: Sequence[GroupPlan], num_shards: Mapping[str, int]) -> None:
        self.tasks: list[Task] = []
        self._plans = {plan.name: plan for plan in plans}
        self._queues = queues_of(plans)
        self._num_shards = num_shards
        self._before: tuple[str, ...] = ()
        self._in_flight: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def compute(self, name: str, seconds: float) -> None:
        name = self._unique(name)
        self.tasks.append(Task(name, COMPUTE, "compute", seconds=seconds, after=self._before))
        self._before = (name,)

    def issue(self, kind: str, phase: Phase, name: str) -> None:
        plan = self._plans[name]
        group, is_alone = self._group(plan, kind)
        if is_alone:
            return
        shard_length = plan.layout.length / self._num_shards.get(plan.scope, plan.gather.size)
        task = self._unique(f"{phase} {kind} {name}")
        queue = self._queues[group.key]
        operation: Kind = "all_reduce"
        size = shard_length * plan.main_dtype.itemsize
        if kind == "gather":
            operation, size = "all_gather", shard_length * plan.param_dtype.itemsize
        elif kind == "reduce":
            operation, size = "reduce_scatter", plan.layout.length * plan.reduce_dtype.itemsize
        self.tasks.append(Task(task, queue, operation, num_bytes=size, after=self._before))
        self._in_flight[name] = task

    def wait(self, name: str) -> None:
        if name in self._in_flight:
            self._before += (self._in_flight.pop(name),)

    def _group(self, plan: GroupPlan, kind: str) -> tuple[Group, bool]:
        if kind == "all_reduce":
            assert plan.replicate is not None
            return plan.replicate, False
        group = plan.gather if kind == "gather" else plan.reduce
        return group, self._num_shards.get(plan.scope, group.size) == 1

    def _unique(self, name: str) -> str:
        self._count[name] += 1
        return name if self._count[name] == 1 else f"{name} ({self._count[name]})"
