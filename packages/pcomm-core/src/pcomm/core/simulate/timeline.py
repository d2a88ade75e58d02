"""The result of a simulation: when what ran, how much of it at once, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.simulate.deadlock import rank_text
from pcomm.core.simulate.rank_classes import Cast
from pcomm.core.simulate.run import Run, TaskId
from pcomm.core.simulate.task import Kind
from pcomm.core.trace.event import Event
from pcomm.core.trace.overlap import intersection, total_s

__all__ = ["TaskTime", "Timeline"]


@dataclass(frozen=True, slots=True)
class TaskTime:
    """One task of one rank in virtual time.

    Args:
        rank: Whose.
        name: Of the task.
        queue: Where it ran.
        kind: What it was.
        num_bytes: What the rank put into a collective.
        ready_s: When the rank was ready for it; a collective then waits for the other ranks.
        start_s: When it began.
        stop_s: When it ended.
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

    def __init__(self, players: Cast, run: Run) -> None:
        self._cast, self._run = players, run

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(self._cast.actor_of))

    @property
    def num_actors(self) -> int:
        """How many ranks had to be run; all others behave like one of them."""
        return len(self._cast.actors)

    @cached_property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return max((stop for stops in self._run.stop_s for stop in stops), default=0.0)

    def times(self, rank: int) -> tuple[TaskTime, ...]:
        """All tasks of a rank, in the order of its program."""
        actor = self._actor(rank)
        size = len(self._run.stop_s[actor])
        return tuple(self._time((actor, place), rank) for place in range(size))

    def time(self, name: str, rank: int = 0) -> TaskTime:
        """One task of a rank.

        Raises:
            ConfigError: The rank or the name is not there.
        """
        actor = self._actor(rank)
        places = self._cast.actors[actor].program.places
        if name not in places:
            raise ConfigError(
                f"Timeline.time: {name!r}",
                found=f"rank {rank} has no task of that name",
                why="Tasks are found by name.",
                fix=near_misses(name, places),
            )
        return self._time((actor, places[name]), rank)

    def events(self, rank: int) -> tuple[Event, ...]:
        """All tasks of a rank as `pcomm.core.trace` has them, for its Chrome trace and overlaps."""
        actor = self._actor(rank)
        meetings = self._cast.actors[actor].meetings
        events = []
        for time, meeting in zip(self.times(rank), meetings, strict=True):
            group, _, role = time.queue.partition(":") if meeting >= 0 else ("", "", "")
            sent = self._cast.meetings[meeting].loads[actor].sent_bytes if meeting >= 0 else 0
            name = time.name if meeting < 0 else f"{time.kind} {time.name}"
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
                (actor, place)
                for actor, stops in enumerate(self._run.stop_s)
                for place in range(len(stops))
            ),
            key=lambda task: self._run.stop_s[task[0]][task[1]],
            default=None,
        )
        path = []
        while last is not None:
            path.append(self._time(last, self._cast.actors[last[0]].ranks[0]))
            last = self._run.causes[last[0]][last[1]]
        return tuple(reversed(path))

    def describe(self) -> str:
        """Makespan, how busy the queues are, and the critical path, as text."""
        lines = [f"predicted makespan {_ms(self.makespan_s)}, {len(self.ranks)} ranks"]
        for actor in self._cast.actors:
            lines.append(rank_text(actor.ranks))
            for queue in actor.program.queues:
                busy = self.busy_s(queue, actor.ranks[0])
                share = busy / self.makespan_s if self.makespan_s else 0.0
                lines.append(f"  {queue:<20} busy {_ms(busy)}, {share:4.0%}")
        lines.append("critical path")
        for i in self.critical_path():
            where = f"rank {i.rank} {i.queue}"
            lines.append(f"  {_ms(i.start_s)} to {_ms(i.stop_s)}  {where:<24} {i.name}")
        return "\n".join(lines)

    def _actor(self, rank: int) -> int:
        if rank not in self._cast.actor_of:
            raise ConfigError(
                f"Timeline: rank {rank}",
                found=f"{rank_text(self.ranks)} were simulated",
                why="A rank without a program does nothing.",
                fix="Ask for one of those ranks.",
            )
        return self._cast.actor_of[rank]

    def _on(self, queue: str, rank: int) -> list[tuple[float, float]]:
        known = {name for actor in self._cast.actors for name in actor.program.queues}
        if queue not in known:
            raise ConfigError(
                f"Timeline: queue {queue!r}",
                found="no task of any rank is on it",
                why="A queue without a task is more often misspelt than idle.",
                fix=near_misses(queue, known),
            )
        return [(t.start_s, t.stop_s) for t in self.times(rank) if t.queue == queue]

    def _time(self, task: TaskId, rank: int) -> TaskTime:
        actor, place = task
        spec = self._cast.actors[actor].program.tasks[place]
        return TaskTime(
            rank,
            spec.name,
            spec.queue,
            spec.kind,
            spec.num_bytes,
            self._run.ready_s[actor][place],
            self._run.start_s[actor][place],
            self._run.stop_s[actor][place],
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.3f} ms"
