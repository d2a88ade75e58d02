"""Bytes and memory of a step of a sharded model, beside the least that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pcomm.core.simulate.program import Rail
from pcomm.core.trace.events import Event, exposed_communication_s, overlap_fraction, total_s
from pcomm.fsdp.compute_costs import Costs, compute_segments, queues_of
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.registered_memory import ArenaPlan
from pcomm.fsdp.runtime.schedule import Operation, Schedule

__all__ = [
    "KINDS",
    "ROLES",
    "Limits",
    "Overlap",
    "PeakMemory",
    "Report",
    "ideal_bytes",
    "limits_of",
    "peak_memory",
    "report_of",
    "sent_bytes",
]


ROLES = ("gather", "reduce", "replicate")

_ROLE_OF = {"gather": "gather", "reduce": "reduce", "all_reduce": "replicate"}


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
        ideal: Bytes by the formula of the strategy for buffers without padding.
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
        for op in schedule.steps:
            if op.kind in _ROLE_OF:
                sent[_ROLE_OF[op.kind]] += int(sent_bytes(op, by_name[op.name]))
    return sent


def _gathered(schedules: Sequence[Schedule], plans: Sequence[GroupPlan]) -> float:
    """Bytes of the gathers that there are, without padding."""
    steps = [op for schedule in schedules for op in schedule.steps if op.kind == "gather"]
    counts = Counter(op.name for op in steps)
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


@dataclass(frozen=True)
class Limits:
    """Least seconds of a step.

    Args:
        one_link_s: Seconds with one link for all bytes of a rank.
        independent_s: Seconds with a link for gathers, one for reduces and one for sums over
            replicas.
    """

    one_link_s: float
    independent_s: float


def sent_bytes(op: Operation, plan: GroupPlan) -> float:
    """Least bytes that this rank sends in a step of its schedule; 0 if it sends nothing."""
    if op.kind == "gather":
        return plan.gather_bytes
    if op.kind == "reduce":
        return plan.reduce_bytes
    if op.kind == "all_reduce":
        replicas = plan.num_replicas
        return 2 * (replicas - 1) / replicas * plan.layout.shard_length * plan.main_dtype.itemsize
    return 0


def limits_of(
    schedules: Sequence[Schedule],
    plans: Sequence[GroupPlan],
    link: Rail,
    costs: Costs | None = None,
) -> Limits:
    """The shortest time that a step can take on given links. Local.

    Follow the steps with buffers without end and gathers that begin at once. Gathers stand in a
    line of their own, reduces in another, sums over replicas in a third, computing in a fourth:

        wait_gather  computing goes on when all gathers up to that one are through
        reduce       begins when what is before it is computed, and reduces before it are through
        all_reduce   the same, after its reduce

    What ends last ends no earlier with any prefetch or number of buffers, since all of them only
    add things to wait for. If all bytes pass one link, the sum of all collectives is a bound too.
    For equal units this is the formula of `pcomm bench fsdp`, which a test holds.

    Args:
        schedules: The schedule of each micro-batch of the step, in order.
        plans: Plans of all parameter groups.
        link: A rank's link; each collective that sends takes its latency once.
        costs: Seconds of computing; None for none, which makes bounds of communication alone.
    """
    by_name = {plan.name: plan for plan in plans}
    now = gathers = reduces = replicas = total = 0.0
    gathered: dict[str, float] = {}
    reduced: dict[str, float] = {}
    for schedule in schedules:
        seconds = compute_segments(schedule, costs) if costs else {}
        for place, op in enumerate(schedule.steps):
            if op.is_anchor:
                now += seconds.get(place, 0.0)
                continue
            num_bytes = sent_bytes(op, by_name[op.name])
            takes = num_bytes / link.bytes_per_s
            # Of collectives on one link, latencies may overlap; bytes do not.
            total += takes
            takes += link.latency_s if num_bytes else 0.0
            if op.kind == "gather":
                gathers += takes
                gathered[op.name] = gathers
            elif op.kind == "wait_gather":
                now = max(now, gathered[op.name])
            elif op.kind == "reduce":
                reduces = max(reduces, now) + takes
                reduced[op.name] = reduces
            elif op.kind == "all_reduce":
                replicas = max(replicas, reduced[op.name]) + takes
    independent = max(now, reduces, replicas)
    return Limits(max(independent, total), independent)


KINDS = ("shards", "gathered", "gradients", "shard gradients")
"""Kinds of buffers: main weights; unsharded parameters; unsharded gradients that are filled, in
flight, or kept for the next unit; gradients of the shards."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of buffers in a step.

    Args:
        by_kind: The most of each kind, each at a time of its own.
        at_once: The most of all kinds together.
    """

    by_kind: dict[str, int]
    at_once: int


def peak_memory(
    schedules: Sequence[Schedule], plans: Sequence[GroupPlan], arenas: Sequence[ArenaPlan] = ()
) -> PeakMemory:
    """The most that one rank holds in a step that begins without gradients. Local.

    Registered memory is held all the time, whether buffers are in it or not.

    Not counted: activations, optimizer state, what an allocator rounds up, and what one operation
    needs while it runs, such as a shard in the format of the gather, or the sum of a micro-batch
    until it is added to the shard's gradient. A gradient that may be reduced as autograd made it is
    taken for one that is, although a few have to be copied.

    Args:
        schedules: The schedule of each micro-batch of the step, in order.
        plans: Plans of all parameter groups.
        arenas: Registered memory of these groups.
    """
    walk = _Walk(plans, arenas)
    for schedule in schedules:
        for op in schedule.steps:
            walk.take(op)
        walk.end()
    return PeakMemory(walk.most, walk.most_at_once)


@dataclass
class _Walk:
    """The buffers that are allocated after each step."""

    plans: Sequence[GroupPlan]
    arenas: Sequence[ArenaPlan]
    gathered: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    deposits: dict[str, int] = field(default_factory=dict)
    free: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.most = dict.fromkeys(KINDS, 0)
        self.most_at_once = 0
        self._by_name = {plan.name: plan for plan in self.plans}
        self._reserved = {"gather": 0, "reduce": 0}
        for arena in self.arenas:
            self._reserved[arena.use] += arena.num_slots * arena.slot_bytes
        self._in_arenas = {(arena.use, name) for arena in self.arenas for name in arena.plans}
        self._shards = sum(_shard_bytes(plan) for plan in self.plans)
        for plan in self.plans:
            if plan.is_local and plan.is_trainable:
                self.deposits[plan.name] = _shard_bytes(plan)
        self._count()

    def take(self, op: Operation) -> None:
        """Follow one step."""
        if op.kind == "use" and op.phase == "backward":
            for plan in self.plans:
                if plan.unit == op.name and plan.is_trainable and not plan.is_local:
                    self._fill(plan)
        elif not op.is_anchor:
            plan = self._by_name[op.name]
            if op.kind == "gather" and not plan.is_one_buffer:
                is_reserved = ("gather", plan.name) in self._in_arenas
                self.gathered[plan.name] = 0 if is_reserved else plan.gathered_bytes
            elif op.kind == "release":
                self.gathered.pop(plan.name, None)
            elif op.kind == "reduce":
                self._fill(plan)
            elif op.kind == "wait_reduce":
                self._finish(plan)
        self._count()

    def end(self) -> None:
        """The micro-batch has ended."""
        self.free.clear()

    def _fill(self, plan: GroupPlan) -> None:
        if plan.name in self.filled:
            return
        buffer = plan.gradient_bytes, str(plan.reduce_dtype)
        if self._is_reused(plan) and buffer in self.free:
            self.free.remove(buffer)
        is_reserved = ("reduce", plan.name) in self._in_arenas
        self.filled[plan.name] = 0 if is_reserved else plan.gradient_bytes

    def _finish(self, plan: GroupPlan) -> None:
        del self.filled[plan.name]
        # With one rank and one format, the unsharded gradient is that of the shard.
        is_shard = plan.reduce.size == 1 and plan.reduce_dtype == plan.main_dtype
        if not is_shard and self._is_reused(plan):
            self.free.append((plan.gradient_bytes, str(plan.reduce_dtype)))
        self.deposits[plan.name] = _shard_bytes(plan)

    def _is_reused(self, plan: GroupPlan) -> bool:
        """True if the gradient's buffer serves other units too: autograd's own tensor does not."""
        return not plan.takes_gradient_over and ("reduce", plan.name) not in self._in_arenas

    def _count(self) -> None:
        now = {
            "shards": self._shards,
            "gathered": self._reserved["gather"] + sum(self.gathered.values()),
            "gradients": self._reserved["reduce"]
            + sum(self.filled.values())
            + sum(size for size, _ in self.free),
            "shard gradients": sum(self.deposits.values()),
        }
        self.most = {kind: max(self.most[kind], now[kind]) for kind in KINDS}
        self.most_at_once = max(self.most_at_once, sum(now.values()))


def _shard_bytes(plan: GroupPlan) -> int:
    num_elements = plan.layout.num_elements if plan.is_local else plan.layout.shard_length
    return num_elements * plan.main_dtype.itemsize
