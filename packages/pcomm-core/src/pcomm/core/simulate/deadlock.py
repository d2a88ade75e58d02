"""Says why a run stopped before its end: who waits for what, and where the orders part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.errors import PcommError
from pcomm.core.simulate.rank_classes import Actor, Cast
from pcomm.core.simulate.run import Run, TaskId

__all__ = ["DeadlockError", "deadlock", "rank_text"]

_MOST_LINES = 16


class DeadlockError(PcommError):
    """Programs that wait for each other for ever, found in virtual time instead of as a hang."""


def deadlock(players: Cast, run: Run) -> DeadlockError:
    """The error for a run in which tasks are left and nothing happens any more."""
    lines = []
    for number, actor in enumerate(players.actors):
        for queue, places in actor.program.queues.items():
            tasks = ((number, place) for place in places)
            first = next((task for task in tasks if not run.has_stopped(task)), None)
            if first is not None:
                reason = _reason(players, run, first)
                lines.append(
                    f"{rank_text(actor.ranks)} on {queue!r} at {_name(players, first)!r}: {reason}"
                )
    more = [f"and {len(lines) - _MOST_LINES} more queues"] if len(lines) > _MOST_LINES else []
    return DeadlockError(
        "simulate",
        found="nothing runs any more\n  " + "\n  ".join(lines[:_MOST_LINES] + more),
        why=_divergence(players) or _circle(players, run),
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


def _reason(players: Cast, run: Run, task: TaskId) -> str:
    if not run.is_ready(task):
        program = players.actors[task[0]].program
        names = [program.tasks[n].name for n in _unfinished(players, run, task)]
        return "waits for its own " + ", ".join(map(repr, names))
    absent = []
    for actor, place in _absent(players, run, task):
        ranks = rank_text(_in_group(players.actors[actor], players, task))
        absent.append(f"{ranks}, {'without such a task' if place is None else 'held elsewhere'}")
    return "waits for " + "; ".join(absent)


def _unfinished(players: Cast, run: Run, task: TaskId) -> list[int]:
    needs = players.actors[task[0]].program.needs[task[1]]
    return [need for need in needs if not run.has_stopped((task[0], need))]


def _absent(players: Cast, run: Run, task: TaskId) -> list[tuple[int, int | None]]:
    """Members that are not ready for a collective."""
    meeting = players.meetings[players.actors[task[0]].meetings[task[1]]]
    return [
        (actor, place)
        for actor, place in meeting.members.items()
        if place is None or not run.is_ready((actor, place))
    ]


def _in_group(actor: Actor, players: Cast, task: TaskId) -> list[int]:
    """Ranks of an actor in the group that `task` stands for."""
    meeting = players.meetings[players.actors[task[0]].meetings[task[1]]]
    return sorted(set(actor.ranks) & set(meeting.group))


def _divergence(players: Cast) -> str:
    """The earliest place at which members of a group differ in what they issue on a queue."""
    found: tuple[int, str] | None = None
    for meeting in {(m.task.queue, m.group): m for m in players.meetings}.values():
        queue = meeting.task.queue
        orders = {a: _collectives(players.actors[a], queue) for a in meeting.members}
        (first, expected), *others = orders.items()
        for actor, order in others:
            place = _first_difference(expected, order)
            if place is not None and (found is None or place < found[0]):
                ranks = [
                    min(set(players.actors[a].ranks) & set(meeting.group)) for a in (first, actor)
                ]
                names = [_nth(expected, place), _nth(order, place)]
                found = (
                    place,
                    f"Orders on queue {queue!r} of group {meeting.group} part at collective "
                    f"{place}: rank {ranks[0]} issues {names[0]}, rank {ranks[1]} {names[1]}.",
                )
    return found[1] if found else ""


def _collectives(actor: Actor, queue: str) -> list[str]:
    tasks = (actor.program.tasks[place] for place in actor.program.queues.get(queue, ()))
    return [task.name for task in tasks if task.is_collective]


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    for place in range(max(len(one), len(other))):
        if one[place : place + 1] != other[place : place + 1]:
            return place
    return None


def _nth(names: Sequence[str], place: int) -> str:
    return repr(names[place]) if place < len(names) else "nothing more"


def _circle(players: Cast, run: Run) -> str:
    """Tasks that wait for each other, each for the next; the orders on the queues agree."""
    task = next(
        (actor, place)
        for actor, stops in enumerate(run.stop_s)
        for place in range(len(stops))
        if not run.has_stopped((actor, place))
    )
    path: dict[TaskId, None] = {}
    while task not in path:
        path[task] = None
        if run.is_ready(task):
            # The orders agree, so every member has the task.
            task = next((a, p) for a, p in _absent(players, run, task) if p is not None)
        else:
            task = (task[0], _unfinished(players, run, task)[0])
    tasks = list(path)
    circle = _chain(players, [*tasks[tasks.index(task) :], task])
    return f"Each queue has the same order on all ranks, but tasks wait in a circle: {circle}."


def _chain(players: Cast, tasks: Iterable[TaskId]) -> str:
    return " -> ".join(
        f"{_name(players, t)!r} of rank {players.actors[t[0]].ranks[0]}" for t in tasks
    )


def _name(players: Cast, task: TaskId) -> str:
    return players.actors[task[0]].program.tasks[task[1]].name
