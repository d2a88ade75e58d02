"""The simulation, tasks that begin, share rails, and end; and its result: when each of them ran."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.simulate.deadlock import (
    MatchedCollective,
    SimulatedJob,
    TaskId,
    TaskTimes,
    classify,
    deadlock,
    rank_text,
)
from pcomm.core.simulate.program import Cluster, Kind, Programs, Rail
from pcomm.core.trace.events import Event, intersection, total_s

__all__ = ["Port", "Ports", "Timeline", "fair_rates", "simulate"]


def simulate(programs: Programs, cluster: Cluster, *, collapse: bool = True) -> Timeline:
    """When each task of each rank runs, if the cluster is as described.

    The result is a prediction of a model, never a measurement. Local: no communication happens.

    Args:
        programs: Tasks by rank.
        cluster: Rails and communicators.
        collapse: Run ranks that behave alike only once. The times are the same without it.

    Raises:
        DeadlockError: Tasks are left that wait for each other.
        ConfigError, TopologyError, DivergenceError: Programs and cluster do not fit together, see
            `pcomm.core.simulate.deadlock.classify`.
    """
    job = classify(programs, cluster, collapse=collapse)
    times = TaskTimes.of(job)
    _Engine(job, cluster, times).play()
    if times.num_left:
        raise deadlock(job, times)
    return Timeline(job, times)


class _Engine:
    """The state of one run between two events."""

    def __init__(self, job: SimulatedJob, cluster: Cluster, times: TaskTimes) -> None:
        self._job, self._times = job, times
        self._rails = {rail.name: rail for rail in cluster.rails}
        self._absent = [len(collective.members) for collective in job.collectives]
        self._needs = [[len(n) for n in a.program.needs] for a in job.classes]
        self._ports = Ports()
        # Computing that shares its processor with transfers, by a number below 0.
        self._computing: dict[int, TaskId] = {}
        self._shares_processor = any(
            rail.processor_bytes_per_s < math.inf for rail in cluster.rails
        )
        self._transfers: dict[int, _Transfer] = {}
        self._changed: set[int] = set()
        # Ends of computing (rank class, place) and of latencies (-1, collective); the time decides,
        # and the numbers only make the order of simultaneous ends the same every time.
        self._ends: list[tuple[float, int, int]] = []
        self._now = 0.0

    def play(self) -> None:
        """Until nothing runs any more."""
        for rank_class, needs in enumerate(self._needs):
            for place, count in enumerate(needs):
                if not count:
                    self._ready((rank_class, place), None)
        while True:
            for collective, rate in sorted(self._ports.rates(self._changed).items()):
                self._transfers[collective].proceed(self._now, rate)
            self._changed.clear()
            stop_s = min((t.stop_s for t in self._transfers.values()), default=math.inf)
            if self._ends:
                stop_s = min(stop_s, self._ends[0][0])
            if stop_s == math.inf:
                return
            self._now = stop_s
            self._advance()

    def _advance(self) -> None:
        """Handle all that ends now."""
        for number in [m for m, t in self._transfers.items() if t.stop_s <= self._now]:
            del self._transfers[number]
            self._changed.discard(number)
            self._changed |= self._ports.stop(number)
            if number < 0:
                self._finish(self._computing[number])
            else:
                self._finish_collective(number)
        while self._ends and self._ends[0][0] <= self._now:
            _, rank_class, place = heapq.heappop(self._ends)
            if rank_class < 0:
                self._move(place)
            else:
                self._finish((rank_class, place))

    def _ready(self, task: TaskId, cause: TaskId | None) -> None:
        """All that a task needs has ended, `cause` last."""
        rank_class, place = task
        self._times.ready(task, self._now)
        collective = self._job.classes[rank_class].collectives[place]
        if collective < 0:
            seconds = self._job.classes[rank_class].program.tasks[place].seconds
            self._times.start(task, self._now, cause)
            if self._shares_processor and seconds:
                number = -1 - len(self._computing)
                self._computing[number] = task
                self._begin(number, seconds, {_processor(rank_class): 1.0})
            else:
                heapq.heappush(self._ends, (self._now + seconds, rank_class, place))
            return
        self._absent[collective] -= 1
        if not self._absent[collective]:
            spec = self._job.collectives[collective]
            for member in spec.tasks():
                self._times.start(member, self._now, cause)
            latency_s = spec.num_steps * self._rails[spec.communicator.rail].latency_s
            heapq.heappush(self._ends, (self._now + latency_s, -1, collective))

    def _move(self, collective: int) -> None:
        spec = self._job.collectives[collective]
        seconds, use = _use(spec, self._rails[spec.communicator.rail])
        if seconds:
            self._begin(collective, seconds, use)
        else:
            self._finish_collective(collective)

    def _begin(self, number: int, seconds: float, use: Mapping[Port, float]) -> None:
        self._ports.start(number, use)
        self._transfers[number] = _Transfer(seconds, self._now)
        self._changed.add(number)

    def _finish_collective(self, collective: int) -> None:
        self._changed.discard(collective)
        for task in self._job.collectives[collective].tasks():
            self._finish(task)

    def _finish(self, task: TaskId) -> None:
        rank_class, place = task
        self._times.stop(task, self._now)
        needs = self._needs[rank_class]
        for follower in self._job.classes[rank_class].program.followers[place]:
            needs[follower] -= 1
            if not needs[follower]:
                self._ready((rank_class, follower), task)


@dataclass
class _Transfer:
    """A collective that moves bytes, or computing on a processor that moves them, too.

    Args:
        left_s: What is left, in seconds that it would take alone.
    """

    left_s: float
    since_s: float
    rate: float = 0.0
    stop_s: float = math.inf

    def proceed(self, now: float, rate: float) -> None:
        if rate != self.rate:
            self.left_s = max(0.0, self.left_s - self.rate * (now - self.since_s))
            self.since_s, self.rate = now, rate
            self.stop_s = now + self.left_s / rate


def _use(collective: MatchedCollective, rail: Rail) -> tuple[float, Mapping[Port, float]]:
    """Seconds that a transfer takes alone, and the share of each port that it then uses."""
    seconds: dict[Port, float] = {}
    for rank_class, (sent, received) in collective.loads.items():
        if rail.full_duplex:
            seconds[Port(rail.name, rank_class, "send")] = sent / rail.bytes_per_s
            seconds[Port(rail.name, rank_class, "receive")] = received / rail.bytes_per_s
        else:
            seconds[Port(rail.name, rank_class, "both")] = (sent + received) / rail.bytes_per_s
        seconds[_processor(rank_class)] = max(sent, received) / rail.processor_bytes_per_s
    longest = max(seconds.values())
    return longest, {port: own / longest for port, own in seconds.items() if own}


class Port(NamedTuple):
    """One direction of one rank's connection to a rail; `both` where the directions share.

    Or the processor of a rank, which has no rail.
    """

    rail: str
    rank_class: int
    direction: str


def _processor(rank_class: int) -> Port:
    return Port("", rank_class, "processor")


Uses = Mapping[int, float]
"""Use of one port by transfer."""


class Ports:
    """Which transfers run, on which ports, and at which rate."""

    def __init__(self) -> None:
        self._on_port: dict[Port, dict[int, float]] = {}
        self._of_transfer: dict[int, Mapping[Port, float]] = {}

    def start(self, transfer: int, use: Mapping[Port, float]) -> None:
        """Let a transfer run."""
        self._of_transfer[transfer] = use
        for port, share in use.items():
            self._on_port.setdefault(port, {})[transfer] = share

    def stop(self, transfer: int) -> set[int]:
        """End a transfer.

        Returns:
            Transfers that shared a port with it.
        """
        met: set[int] = set()
        for port in self._of_transfer.pop(transfer):
            on_port = self._on_port[port]
            del on_port[transfer]
            met.update(on_port)
        return met

    def rates(self, changed: Iterable[int]) -> dict[int, float]:
        """New rates of `changed` and of all that share ports with them, directly or not."""
        found: set[int] = set()
        rows: set[tuple[tuple[int, float], ...]] = set()
        todo = [transfer for transfer in changed if transfer in self._of_transfer]
        while todo:
            transfer = todo.pop()
            if transfer in found:
                continue
            found.add(transfer)
            for port in self._of_transfer[transfer]:
                on_port = self._on_port[port]
                # Ports of ranks that do the same give the same row, and one of them says it all.
                rows.add(tuple(sorted(on_port.items())))
                if len(on_port) > 1:
                    todo.extend(other for other in on_port if other not in found)
        return fair_rates([dict(row) for row in sorted(rows)])


def fair_rates(ports: Iterable[Uses]) -> dict[int, float]:
    """Max-min fair rates of the transfers that occur in `ports`.

    Args:
        ports: Share of each port that each transfer on it takes at rate 1.

    Returns:
        Rate by transfer, above 0 and at most 1 where some port is used fully at rate 1.
    """
    open_ports = [dict(uses) for uses in ports]
    room = [1.0] * len(open_ports)
    rates: dict[int, float] = {}
    level = 0.0
    while any(open_ports):
        demand = [sum(uses.values()) for uses in open_ports]
        rise = [r / d if d else float("inf") for r, d in zip(room, demand, strict=True)]
        step = min(rise)
        level += step
        full: set[int] = set()
        for place, uses in enumerate(open_ports):
            room[place] -= demand[place] * step
            # The port that gave the minimum is full by definition, whatever rounding says.
            if rise[place] <= step * (1 + 1e-12):
                full.update(uses)
        for transfer in sorted(full):
            rates[transfer] = level
        open_ports = [{t: u for t, u in uses.items() if t not in full} for uses in open_ports]
    return rates


@dataclass(frozen=True, slots=True)
class TaskTime:
    """One task of one rank in virtual time.

    Args:
        rank: Global rank that ran it.
        name: Name of the task.
        queue: Queue that it ran on.
        kind: Operation, or `compute`.
        num_bytes: Bytes that the rank put into a collective.
        ready_s: Time at which the rank was ready for it, in seconds; a collective then waits for
            the other ranks.
        start_s: Time at which it began, in seconds.
        stop_s: Time at which it ended, in seconds.
    """

    rank: int
    name: str
    queue: str
    kind: Kind
    num_bytes: float
    ready_s: float
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.stop_s - self.start_s


class Timeline:
    """When every task of every rank ran. A prediction of a model, never a measurement."""

    def __init__(self, job: SimulatedJob, times: TaskTimes) -> None:
        self._job, self._times = job, times

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(self._job.class_of))

    @property
    def num_rank_classes(self) -> int:
        """Number of ranks that had to be run; all others behave like one of them."""
        return len(self._job.classes)

    @cached_property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return max((stop for stops in self._times.stop_s for stop in stops), default=0.0)

    def times(self, rank: int) -> tuple[TaskTime, ...]:
        """All tasks of a rank, in the order of its program."""
        rank_class = self._class(rank)
        size = len(self._times.stop_s[rank_class])
        return tuple(self._time((rank_class, place), rank) for place in range(size))

    def time(self, name: str, rank: int = 0) -> TaskTime:
        """One task of a rank.

        Raises:
            ConfigError: The rank or the name is not there.
        """
        rank_class = self._class(rank)
        places = self._job.classes[rank_class].program.places
        if name not in places:
            raise ConfigError(
                f"Timeline.time: {name!r}",
                found=f"rank {rank} has no task of that name",
                why="Tasks are found by name.",
                fix=near_misses(name, places),
            )
        return self._time((rank_class, places[name]), rank)

    def events(self, rank: int) -> tuple[Event, ...]:
        """All tasks of a rank as `pcomm.core.trace` has them, for its Chrome trace and overlaps."""
        rank_class = self._class(rank)
        collectives = self._job.classes[rank_class].collectives
        events = []
        for time, collective in zip(self.times(rank), collectives, strict=True):
            group, _, role = time.queue.partition(":") if collective >= 0 else ("", "", "")
            sent, name = 0.0, time.name
            if collective >= 0:
                sent = self._job.collectives[collective].loads[rank_class].sent_bytes
                name = f"{time.kind} {time.name}"
            events.append(
                Event(group, role, name, round(sent), time.start_s, time.stop_s, rank, time.queue)
            )
        return tuple(events)

    def busy_s(self, queue: str, rank: int = 0) -> float:
        """How long a queue of a rank ran something.

        Raises:
            ConfigError: No rank has such a queue.
        """
        return total_s(self._on(queue, rank))

    def overlap_s(self, one: str, other: str, rank: int = 0) -> float:
        """How long two queues of a rank ran something at the same time.

        Raises:
            ConfigError: No rank has such a queue.
        """
        return total_s(intersection(self._on(one, rank), self._on(other, rank)))

    def critical_path(self) -> tuple[TaskTime, ...]:
        """Tasks each of which began when the one before it ended, up to the end of the run.

        From the first task to the one that ends last; they may change rank at a collective.
        """
        last: TaskId | None = max(
            (
                (rank_class, place)
                for rank_class, stops in enumerate(self._times.stop_s)
                for place in range(len(stops))
            ),
            key=lambda task: self._times.stop_s[task[0]][task[1]],
            default=None,
        )
        path = []
        while last is not None:
            path.append(self._time(last, self._job.classes[last[0]].ranks[0]))
            last = self._times.causes[last[0]][last[1]]
        return tuple(reversed(path))

    def describe(self) -> str:
        """Makespan, how busy the queues are, and the critical path, as text."""
        lines = [f"predicted makespan {_ms(self.makespan_s)}, {len(self.ranks)} ranks"]
        for rank_class in self._job.classes:
            lines.append(rank_text(rank_class.ranks))
            for queue in rank_class.program.queues:
                busy = self.busy_s(queue, rank_class.ranks[0])
                share = busy / self.makespan_s if self.makespan_s else 0.0
                lines.append(f"  {queue:<20} busy {_ms(busy)}, {share:4.0%}")
        lines.append("critical path")
        for i in self.critical_path():
            where = f"rank {i.rank} {i.queue}"
            lines.append(f"  {_ms(i.start_s)} to {_ms(i.stop_s)}  {where:<24} {i.name}")
        return "\n".join(lines)

    def _class(self, rank: int) -> int:
        if rank not in self._job.class_of:
            raise ConfigError(
                f"Timeline: rank {rank}",
                found=f"{rank_text(self.ranks)} were simulated",
                why="A rank without a program does nothing.",
                fix="Ask for one of those ranks.",
            )
        return self._job.class_of[rank]

    def _on(self, queue: str, rank: int) -> list[tuple[float, float]]:
        known = {name for rank_class in self._job.classes for name in rank_class.program.queues}
        if queue not in known:
            raise ConfigError(
                f"Timeline: queue {queue!r}",
                found="no task of any rank is on it",
                why="A queue without a task is more often misspelt than idle.",
                fix=near_misses(queue, known),
            )
        return [(t.start_s, t.stop_s) for t in self.times(rank) if t.queue == queue]

    def _time(self, task: TaskId, rank: int) -> TaskTime:
        rank_class, place = task
        spec = self._job.classes[rank_class].program.tasks[place]
        return TaskTime(
            rank,
            spec.name,
            spec.queue,
            spec.kind,
            spec.num_bytes,
            self._times.ready_s[rank_class][place],
            self._times.start_s[rank_class][place],
            self._times.stop_s[rank_class][place],
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.3f} ms"
