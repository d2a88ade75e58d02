"""The error for a run that stopped before its end: what waits for what, and where orders part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.errors import PcommError
from pcomm.core.simulate.rank_classes import RankClass, SimulatedJob
from pcomm.core.simulate.task_times import TaskId, TaskTimes

__all__ = ["DeadlockError", "deadlock", "rank_text"]

_MOST_LINES = 16


class DeadlockError(PcommError):
    """Programs that wait for each other for ever, found in virtual time instead of as a hang."""


def deadlock(job: SimulatedJob, times: TaskTimes) -> DeadlockError:
    """The error for a run in which tasks are left and nothing happens any more."""
    lines = []
    for number, rank_class in enumerate(job.classes):
        for queue, places in rank_class.program.queues.items():
            tasks = ((number, place) for place in places)
            first = next((task for task in tasks if not times.has_stopped(task)), None)
            if first is not None:
                reason = _reason(job, times, first)
                lines.append(
                    f"{rank_text(rank_class.ranks)} on {queue!r} at {_name(job, first)!r}: {reason}"
                )
    more = [f"and {len(lines) - _MOST_LINES} more queues"] if len(lines) > _MOST_LINES else []
    return DeadlockError(
        "simulate",
        found="nothing runs any more\n  " + "\n  ".join(lines[:_MOST_LINES] + more),
        why=_divergence(job) or _circle(job, times),
        fix="Issue the same collectives in the same order on every rank of a group, and wait only "
        "for tasks that can end first.",
    )


def rank_text(ranks: Sequence[int]) -> str:
    """Ranks as runs: `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, ends)) for ends in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _reason(job: SimulatedJob, times: TaskTimes, task: TaskId) -> str:
    if not times.is_ready(task):
        program = job.classes[task[0]].program
        names = [program.tasks[n].name for n in _unfinished(job, times, task)]
        return "waits for its own " + ", ".join(map(repr, names))
    absent = []
    for rank_class, place in _absent(job, times, task):
        ranks = rank_text(_in_group(job.classes[rank_class], job, task))
        absent.append(f"{ranks}, {'without such a task' if place is None else 'held elsewhere'}")
    return "waits for " + "; ".join(absent)


def _unfinished(job: SimulatedJob, times: TaskTimes, task: TaskId) -> list[int]:
    needs = job.classes[task[0]].program.needs[task[1]]
    return [need for need in needs if not times.has_stopped((task[0], need))]


def _absent(job: SimulatedJob, times: TaskTimes, task: TaskId) -> list[tuple[int, int | None]]:
    """Members that are not ready for a collective."""
    collective = job.collectives[job.classes[task[0]].collectives[task[1]]]
    return [
        (rank_class, place)
        for rank_class, place in collective.members.items()
        if place is None or not times.is_ready((rank_class, place))
    ]


def _in_group(rank_class: RankClass, job: SimulatedJob, task: TaskId) -> list[int]:
    """Ranks of a rank class in the group that `task` stands for."""
    collective = job.collectives[job.classes[task[0]].collectives[task[1]]]
    return sorted(set(rank_class.ranks) & set(collective.group))


def _divergence(job: SimulatedJob) -> str:
    """The earliest place at which members of a group differ in what they issue on a queue."""
    found: tuple[int, str] | None = None
    for collective in {(m.task.queue, m.group): m for m in job.collectives}.values():
        queue = collective.task.queue
        orders = {a: _collectives(job.classes[a], queue) for a in collective.members}
        (first, expected), *others = orders.items()
        for rank_class, order in others:
            place = _first_difference(expected, order)
            if place is not None and (found is None or place < found[0]):
                both = job.classes[first], job.classes[rank_class]
                ranks = [min(set(one.ranks) & set(collective.group)) for one in both]
                names = [_nth(expected, place), _nth(order, place)]
                found = (
                    place,
                    f"Orders on queue {queue!r} of group {collective.group} part at collective "
                    f"{place}: rank {ranks[0]} issues {names[0]}, rank {ranks[1]} {names[1]}.",
                )
    return found[1] if found else ""


def _collectives(rank_class: RankClass, queue: str) -> list[str]:
    tasks = (rank_class.program.tasks[place] for place in rank_class.program.queues.get(queue, ()))
    return [task.name for task in tasks if task.is_collective]


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    for place in range(max(len(one), len(other))):
        if one[place : place + 1] != other[place : place + 1]:
            return place
    return None


def _nth(names: Sequence[str], place: int) -> str:
    return repr(names[place]) if place < len(names) else "nothing more"


def _circle(job: SimulatedJob, times: TaskTimes) -> str:
    """Tasks that wait for each other, each for the next; the orders on the queues agree."""
    task = next(
        (rank_class, place)
        for rank_class, stops in enumerate(times.stop_s)
        for place in range(len(stops))
        if not times.has_stopped((rank_class, place))
    )
    path: dict[TaskId, None] = {}
    while task not in path:
        path[task] = None
        if times.is_ready(task):
            # The orders agree, so every member has the task.
            task = next((a, p) for a, p in _absent(job, times, task) if p is not None)
        else:
            task = (task[0], _unfinished(job, times, task)[0])
    tasks = list(path)
    circle = _chain(job, [*tasks[tasks.index(task) :], task])
    return f"Each queue has the same order on all ranks, but tasks wait in a circle: {circle}."


def _chain(job: SimulatedJob, tasks: Iterable[TaskId]) -> str:
    return " -> ".join(f"{_name(job, t)!r} of rank {job.classes[t[0]].ranks[0]}" for t in tasks)


def _name(job: SimulatedJob, task: TaskId) -> str:
    return job.classes[task[0]].program.tasks[task[1]].name
