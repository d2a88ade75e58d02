"""The result of a simulation: when each task ran, how queues overlap, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.simulate.deadlock import rank_text
from pcomm.core.simulate.rank_classes import SimulatedJob
from pcomm.core.simulate.task import Kind
from pcomm.core.simulate.task_times import TaskId, TaskTimes
from pcomm.core.trace.event import Event
from pcomm.core.trace.overlap import intersection, total_s

__all__ = ["TaskTime", "Timeline"]


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
