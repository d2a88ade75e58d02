"""The program of one rank, checked and turned into numbers: which tasks each task waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.simulate.task import Task

__all__ = ["Program", "resolve"]


@dataclass(frozen=True)
class Program:
    """Tasks and the tasks that they wait for, by place in the program.

    Args:
        tasks: Tasks in the order in which the host issues them.
        needs: Places of the tasks that must have ended before each task: the one before it on its
            queue, then those it names.
        followers: Places of the tasks that need each task.
        queues: Places of the tasks on each queue, in order.
        places: Place of each task by name.
    """

    tasks: tuple[Task, ...]
    needs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    queues: dict[str, tuple[int, ...]]
    places: dict[str, int]

    @property
    def communicators(self) -> list[str]:
        """Queues with collectives, in order of first use."""
        return list(dict.fromkeys(task.queue for task in self.tasks if task.is_collective))

    def collective(self, queue: str, name: str) -> int | None:
        """Place of the collective of that name on that queue, if there is one."""
        place = self.places.get(name)
        if place is None or not self.tasks[place].is_collective:
            return None
        return place if self.tasks[place].queue == queue else None


def resolve(rank: int, tasks: Sequence[Task], communicators: Collection[str]) -> Program:
    """Check one program and number it.

    Args:
        rank: Rank that errors name.
        tasks: Tasks in the order in which the host issues them.
        communicators: Queues on which collectives may run.

    Raises:
        ConfigError: A name occurs twice, `after` names no task of this program, or a collective
            is on a queue without a communicator.
    """
    places = {task.name: place for place, task in enumerate(tasks)}
    if len(places) < len(tasks):
        twice = next(t.name for place, t in enumerate(tasks) if places[t.name] != place)
        raise ConfigError(
            f"program of rank {rank}",
            found=f"two tasks named {twice!r}",
            why="Tasks wait for each other, and collectives meet, by name.",
            fix="Put the layer, the phase or the micro-batch into the name.",
        )
    queues: dict[str, list[int]] = {}
    needs: list[tuple[int, ...]] = []
    followers: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        if task.is_collective and task.queue not in communicators:
            raise ConfigError(
                f"program of rank {rank}: {task.kind} {task.name!r}",
                found=f"queue {task.queue!r} has no communicator",
                why="It is not known which ranks it meets there, nor over which rail.",
                fix="Add a SimulatedCommunicator with that queue to the cluster. "
                + near_misses(task.queue, communicators),
            )
        on_queue = queues.setdefault(task.queue, [])
        own = dict.fromkeys(on_queue[-1:])
        for name in task.after:
            if name not in places:
                raise ConfigError(
                    f"program of rank {rank}: task {task.name!r}",
                    found=f"it waits for {name!r}, which is not in the program",
                    why="It would wait for ever.",
                    fix=near_misses(name, places),
                )
            own[places[name]] = None
        for need in own:
            followers[need].append(place)
        needs.append(tuple(own))
        on_queue.append(place)
    return Program(
        tuple(tasks),
        tuple(needs),
        tuple(map(tuple, followers)),
        {queue: tuple(on_queue) for queue, on_queue in queues.items()},
        places,
    )
