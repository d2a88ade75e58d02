"""Bytes and memory of a step of a sharded model, beside the least that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.core.simulate.cluster import Rail
from pcomm.core.trace.event import Event
from pcomm.core.trace.overlap import exposed_communication_s, overlap_fraction, total_s
from pcomm.fsdp.analysis.limits import Limits, limits_of, sent_bytes
from pcomm.fsdp.analysis.peak_memory import PeakMemory, peak_memory
from pcomm.fsdp.analysis.simulated import Costs, queues_of
from pcomm.fsdp.memory.pool_plan import ArenaPlan
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.schedule import Schedule

__all__ = ["ROLES", "Overlap", "Report", "ideal_bytes", "report_of"]

ROLES = ("gather", "reduce", "replicate")

_ROLE_OF_STEP = {"gather": "gather", "reduce": "reduce", "all_reduce": "replicate"}


@dataclass(frozen=True)
class Overlap:
    """The communication that a recorded step hid.

    Args:
        hidden: Fraction of the time of communication in which the rank computed.
        gather_reduce: Fraction of the shorter of a gather's and a reduce's queue in which both were
            busy; None where they share a queue or one was never used.
    """

    hidden: float
    gather_reduce: float | None


@dataclass(frozen=True)
class Report:
    """Figures of one step on one rank; all but `decided` are None until the schedule is recorded.

    Args:
        decided: Parameter groups, measured separations and the schedule, as text.
        micro_batches: Number of micro-batches of the step.
        sent: Bytes that the rank sends at least, by role, counted from schedules and plans.
        ideal: The same by the formula of the strategy for buffers without padding.
        kept: Bytes of it that are not sent, since units stay gathered from forward to backward.
        padding: Fraction of all flat buffers that belongs to no parameter.
        memory: The most memory that buffers take.
        limits: Least seconds of the step on the given link.
        step_s: Seconds of the step as measured.
        overlap: Overlap in the given events.
    """

    decided: str
    micro_batches: int
    padding: float
    sent: dict[str, int] | None = None
    ideal: dict[str, float] | None = None
    kept: float = 0.0
    memory: PeakMemory | None = None
    limits: Limits | None = None
    step_s: float | None = None
    overlap: Overlap | None = None

    @property
    def ratios(self) -> dict[str, float] | None:
        """Each bound divided by the measured step: 1 is the best that there can be."""
        if self.limits is None or not self.step_s:
            return None
        return {
            "one link": self.limits.one_link_s / self.step_s,
            "independent links": self.limits.independent_s / self.step_s,
        }

    def __str__(self) -> str:
        """All of it, to be read."""
        return "\n".join([self.decided, *self._figures()])

    def _figures(self) -> list[str]:
        lines = [f"padding {self.padding:.2%} of flat buffers"]
        if self.sent is not None and self.ideal is not None:
            lines.append(f"sent by this rank in a step of {self.micro_batches} micro-batch(es)")
            for role in ROLES:
                if self.sent[role] or self.ideal[role]:
                    less = role == "gather" and self.kept > 0
                    kept = f" less {_size(self.kept)} that stay gathered" if less else ""
                    formula = f"formula {_size(self.ideal[role])}{kept}"
                    lines.append(f"  {role:<16} {_size(self.sent[role])}, {formula}")
        if self.memory is not None:
            lines.append(f"most memory of buffers, at once {_size(self.memory.at_once)}")
            lines += [f"  {kind:<16} {_size(most)}" for kind, most in self.memory.by_kind.items()]
        if self.limits is not None:
            ratios = self.ratios or {}
            lines.append("a step takes at least")
            for name, seconds in (
                ("one link", self.limits.one_link_s),
                ("independent links", self.limits.independent_s),
            ):
                of = f", {ratios[name]:.2f} of the measured step" if name in ratios else ""
                lines.append(f"  {name:<17} {seconds * 1e3:.3f} ms{of}")
        if self.overlap is not None:
            lines.append(f"communication hidden behind computing {self.overlap.hidden:.1%}")
            if self.overlap.gather_reduce is not None:
                both = self.overlap.gather_reduce
                lines.append(f"gathers and reduces at the same time {both:.1%}")
        return lines


def report_of(
    decided: str,
    schedules: Sequence[Schedule],
    plans: Sequence[GroupPlan],
    *,
    link: Rail | None = None,
    costs: Costs | None = None,
    step_s: float | None = None,
    events: Sequence[Event] = (),
    arenas: Sequence[ArenaPlan] = (),
) -> Report:
    """The figures of a step. Local.

    Args:
        decided: Text before all figures.
        schedules: The schedule of each micro-batch, in order; none if nothing is recorded yet.
        plans: Plans of all parameter groups.
        link: The link of one rank, for bounds.
        costs: Seconds of computing, for bounds; without them communication alone is bounded.
        step_s: Seconds of a step as measured.
        events: Events of steps recorded through `traced` groups and `Sharded.recording`.
        arenas: Registered memory of these groups.
    """
    length = sum(plan.layout.length for plan in plans if not plan.is_local)
    padding = sum(plan.layout.padding for plan in plans if not plan.is_local)
    fraction = padding / length if length else 0.0
    overlap = _overlap(events, plans) if events else None
    if not schedules:
        return Report(decided, 0, fraction, step_s=step_s, overlap=overlap)
    ideal = ideal_bytes(plans, len(schedules))
    return Report(
        decided=decided,
        micro_batches=len(schedules),
        padding=fraction,
        sent=_sent(schedules, plans),
        ideal=ideal,
        kept=ideal["gather"] - _gathered(schedules, plans),
        memory=peak_memory(schedules, plans, arenas),
        limits=None if link is None else limits_of(schedules, plans, link, costs),
        step_s=step_s,
        overlap=overlap,
    )


def ideal_bytes(plans: Sequence[GroupPlan], micro_batches: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, by role, if a strategy is followed to the letter.

    With N ranks, P elements without padding and b bytes each, a gather or a reduce sends
    (N-1)/N P b. `keep="use"` gathers twice in each micro-batch, `"backward"` once, all others once
    a step; gradients are reduced in each micro-batch or once; M replicas sum P/N elements once,
    which sends 2 (M-1)/M P/N b. Units that backward needs first stay, so that a schedule may
    gather less. Frozen parameters have no gradients.
    """
    ideal = dict.fromkeys(ROLES, 0.0)
    for plan in plans:
        size, elements = plan.gather.size, plan.layout.num_elements
        moved = (size - 1) / size * elements
        times = {"use": 2 * micro_batches, "backward": micro_batches}.get(plan.reshard.keep, 1)
        ideal["gather"] += times * moved * plan.param_dtype.itemsize
        if plan.is_trainable:
            times = micro_batches if plan.reshard.reduce == "micro_batch" else 1
            ideal["reduce"] += times * moved * plan.reduce_dtype.itemsize
            replicas = plan.num_replicas
            sums = 2 * (replicas - 1) / replicas * elements / size
            ideal["replicate"] += sums * plan.main_dtype.itemsize
    return ideal


def _sent(schedules: Sequence[Schedule], plans: Sequence[GroupPlan]) -> dict[str, int]:
    by_name = {plan.name: plan for plan in plans}
    sent = dict.fromkeys(ROLES, 0)
    for schedule in schedules:
        for step in schedule.steps:
            if step.kind in _ROLE_OF_STEP:
                sent[_ROLE_OF_STEP[step.kind]] += int(sent_bytes(step, by_name[step.name]))
    return sent


def _gathered(schedules: Sequence[Schedule], plans: Sequence[GroupPlan]) -> float:
    """Bytes of the gathers that there are, without padding."""
    steps = [step for schedule in schedules for step in schedule.steps if step.kind == "gather"]
    counts = Counter(step.name for step in steps)
    return sum(
        counts[plan.name]
        * (plan.gather.size - 1)
        / plan.gather.size
        * plan.layout.num_elements
        * plan.param_dtype.itemsize
        for plan in plans
    )


def _overlap(events: Sequence[Event], plans: Sequence[GroupPlan]) -> Overlap:
    moving: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.is_communication:
            moving.setdefault(event.rank, []).append((event.start_s, event.stop_s))
    num_ranks = len({event.rank for event in events})
    busy = sum(total_s(intervals) for intervals in moving.values()) / num_ranks
    hidden = 1 - exposed_communication_s(events) / busy if busy else 0.0
    used = {event.queue for event in events}
    queues = queues_of(plans)
    pairs = {(queues[plan.gather.key], queues[plan.reduce.key]) for plan in plans}
    apart = sorted(pair for pair in pairs if pair[0] != pair[1] and used.issuperset(pair))
    both = [overlap_fraction(events, a=gather, b=reduce) for gather, reduce in apart]
    return Overlap(hidden, max(both) if both else None)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3f} MiB" if num_bytes >= 2**20 else f"{num_bytes:.0f} bytes"
