"""Whether a program can run: ranks that do the same, cycles of waits, and orders of issue."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError, DivergenceError, PcommError, TopologyError
from pcomm.core.simulate.program import (
    Cluster,
    Load,
    Program,
    Programs,
    SimulatedCommunicator,
    Task,
    loads,
    resolve,
)

__all__ = [
    "DeadlockError",
    "MatchedCollective",
    "SimulatedJob",
    "TaskId",
    "TaskTimes",
    "check_issue_order",
    "classify",
    "deadlock",
    "rank_text",
]


Members = tuple[int, ...]
MembersOf = dict[str, dict[int, Members]]


@dataclass(frozen=True)
class RankClass:
    """Ranks that behave alike.

    Args:
        ranks: All ranks of the class, ascending; the first is the one that is run.
        program: Program of each of them.
        collectives: Place in `SimulatedJob.collectives` for each task; -1 for a task that is not
            a collective.
    """

    ranks: tuple[int, ...]
    program: Program
    collectives: tuple[int, ...]


@dataclass(frozen=True)
class MatchedCollective:
    """A collective whose tasks were found in the programs of its members.

    Args:
        task: Task of the first member.
        communicator: Communicator that it runs on.
        group: Ranks of one of the groups that it stands for.
        members: Place of the task in the program of each rank class of the group; None where the
            program does not have it, so that the others wait for ever.
        num_steps: Number of steps of the algorithm.
        loads: Bytes that each rank class sends and receives.
    """

    task: Task
    communicator: SimulatedCommunicator
    group: Members
    members: dict[int, int | None]
    num_steps: int
    loads: dict[int, Load]

    def tasks(self) -> list[tuple[int, int]]:
        """Rank class and place of the task for each member that has it."""
        return [(number, place) for number, place in self.members.items() if place is not None]


@dataclass(frozen=True)
class SimulatedJob:
    """All rank classes and collectives of a simulation.

    Args:
        classes: All rank classes.
        collectives: All collectives.
        class_of: Place in `classes` of each rank.
    """

    classes: tuple[RankClass, ...]
    collectives: tuple[MatchedCollective, ...]
    class_of: dict[int, int]


def classify(programs: Programs, cluster: Cluster, *, collapse: bool) -> SimulatedJob:
    """Resolve programs, and find rank classes and collectives.

    Args:
        programs: Tasks by rank.
        cluster: Rails and communicators.
        collapse: True if ranks that behave alike become one class, False for one class a rank.

    Raises:
        ConfigError: A program does not stand by itself, or a broadcast has no such source.
        TopologyError: A collective on a rank that is in no group of its communicator, or a group
            with a rank that has no program.
        DivergenceError: Members of a collective give it different operations or sizes.
    """
    communicators = {c.queue: c for c in cluster.communicators}
    resolved = _resolve_all(programs, communicators)
    groups = _groups(resolved, communicators)
    colours = _colours(resolved, groups, collapse)
    by_colour: dict[int, list[int]] = {}
    for rank in sorted(resolved):
        by_colour.setdefault(colours[rank], []).append(rank)
    class_of = {rank: number for number, ranks in enumerate(by_colour.values()) for rank in ranks}
    collectives: list[MatchedCollective] = []
    known: dict[Hashable, dict[str, int]] = {}
    classes = []
    for ranks in map(tuple, by_colour.values()):
        program = resolved[ranks[0]]
        # Groups whose members have the same colours are one group here.
        own: dict[str, tuple[Members, dict[str, int]]] = {}
        for queue in program.communicators:
            group = groups[queue][ranks[0]]
            key = (queue, tuple(sorted(class_of[rank] for rank in group)))
            own[queue] = group, known.setdefault(key, {})
        places = []
        for task in program.tasks:
            if not task.is_collective:
                places.append(-1)
                continue
            group, by_name = own[task.queue]
            if task.name not in by_name:
                by_name[task.name] = len(collectives)
                communicator = communicators[task.queue]
                collectives.append(_matched(task, communicator, group, resolved, class_of))
            places.append(by_name[task.name])
        classes.append(RankClass(ranks, program, tuple(places)))
    return SimulatedJob(tuple(classes), tuple(collectives), class_of)


def _resolve_all(
    programs: Programs, communicators: dict[str, SimulatedCommunicator]
) -> dict[int, Program]:
    """One `Program` for all ranks that have equal tasks, so that identity is equality."""
    # The tasks are kept with the answer: an identity means nothing once its object is gone.
    by_identity: dict[int, tuple[Sequence[Task], Program]] = {}
    by_tasks: dict[tuple[Task, ...], Program] = {}
    resolved = {}
    for rank, tasks in programs.items():
        if id(tasks) not in by_identity:
            key = tuple(tasks)
            if key not in by_tasks:
                by_tasks[key] = resolve(rank, key, communicators)
            by_identity[id(tasks)] = tasks, by_tasks[key]
        resolved[rank] = by_identity[id(tasks)][1]
    return resolved


def _groups(
    resolved: dict[int, Program], communicators: dict[str, SimulatedCommunicator]
) -> MembersOf:
    groups = {q: {r: g for g in c.groups for r in g} for q, c in communicators.items()}
    for rank, program in resolved.items():
        for queue in program.communicators:
            if rank not in groups[queue]:
                raise TopologyError(
                    f"program of rank {rank}: collectives on queue {queue!r}",
                    found=f"the rank is in none of its groups {list(communicators[queue].groups)}",
                    why="A collective is between the members of a group.",
                    fix="Add the rank to a group, or leave these tasks out of its program.",
                )
            missing = [r for r in groups[queue][rank] if r not in resolved]
            if missing:
                raise TopologyError(
                    f"simulate: group {groups[queue][rank]} of queue {queue!r}",
                    found=f"no program for ranks {missing}",
                    why="The others would wait for them for ever.",
                    fix="Give every member of a group a program.",
                )
    return groups


def _colours(resolved: dict[int, Program], groups: MembersOf, collapse: bool) -> dict[int, int]:
    if not collapse:
        return {rank: rank for rank in resolved}
    sources = {id(p): _queues_with_source(p) for p in resolved.values()}
    ids = {id(p): place for place, p in enumerate(resolved.values())}
    colours = _numbered(
        {
            # In a broadcast the place in the group matters too.
            rank: (ids[id(p)], tuple(groups[q][rank].index(rank) for q in sources[id(p)]))
            for rank, p in resolved.items()
        }
    )
    queues = {id(p): p.communicators for p in resolved.values()}
    count = len(set(colours.values()))
    while True:
        met: dict[Members, tuple[int, ...]] = {}
        signatures: dict[int, Hashable] = {}
        for rank, program in resolved.items():
            around = []
            for queue in queues[id(program)]:
                group = groups[queue][rank]
                if group not in met:
                    met[group] = tuple(sorted(colours[other] for other in group))
                around.append(met[group])
            signatures[rank] = (colours[rank], tuple(around))
        colours = _numbered(signatures)
        if len(set(colours.values())) == count:
            return colours
        count = len(set(colours.values()))


def _numbered(signatures: dict[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(s, len(numbers)) for rank, s in signatures.items()}


def _queues_with_source(program: Program) -> list[str]:
    return list(dict.fromkeys(t.queue for t in program.tasks if t.kind == "broadcast"))


def _matched(
    first: Task,
    communicator: SimulatedCommunicator,
    group: Members,
    resolved: dict[int, Program],
    class_of: dict[int, int],
) -> MatchedCollective:
    place_in: dict[int, int | None] = {}
    for rank in group:
        program = resolved[rank]
        if id(program) not in place_in:
            place_in[id(program)] = program.collective(first.queue, first.name)
    members: dict[int, int | None] = {}
    num_bytes = []
    for rank in group:
        place = place_in[id(resolved[rank])]
        members[class_of[rank]] = place
        task = first if place is None else resolved[rank].tasks[place]
        _check_agreement(first, task, group, rank)
        num_bytes.append(task.num_bytes)
    if not 0 <= first.source < len(group):
        raise ConfigError(
            f"broadcast {first.name!r} on queue {communicator.queue!r}",
            found=f"source {first.source}, and the group has {len(group)} ranks",
            why="The source is a place within the group, counted from 0.",
            fix=f"Use 0 to {len(group) - 1}.",
        )
    steps, all_loads = loads(first.kind, communicator.algorithm, num_bytes, first.source)
    own = {class_of[rank]: load for rank, load in zip(group, all_loads, strict=True)}
    return MatchedCollective(first, communicator, group, members, steps, own)


def _check_agreement(first: Task, task: Task, group: Members, rank: int) -> None:
    same = (task.kind, task.source) == (first.kind, first.source)
    uneven = first.kind in ("all_gather", "all_to_all")
    if same and (uneven or task.num_bytes == first.num_bytes):
        return
    raise DivergenceError(
        f"collective {first.name!r} on queue {first.queue!r} of group {group}",
        found=f"rank {rank} has {task.kind} of {task.num_bytes} bytes from source {task.source}, "
        f"another {first.kind} of {first.num_bytes} bytes from source {first.source}",
        why="All members of a collective must call the same operation with sizes that fit.",
        fix="Build the programs of a group from one schedule.",
    )


TaskId = tuple[int, int]
"""Place of the rank class, and place of the task in its program."""


@dataclass
class TaskTimes:
    """Virtual times by rank class and place; infinite where something has not happened.

    Args:
        ready_s: Time at which all that the task needs on its own rank had ended, in seconds.
        start_s: Time at which it began: for a collective, the last member was ready.
        stop_s: Time at which it ended.
        causes: Task whose end let it begin; for a collective one of the last member.
        num_left: Number of tasks that have not ended.
    """

    ready_s: list[list[float]]
    start_s: list[list[float]]
    stop_s: list[list[float]]
    causes: list[list[TaskId | None]]
    num_left: int

    @classmethod
    def of(cls, job: SimulatedJob) -> TaskTimes:
        """Nothing has happened yet."""
        sizes = [len(rank_class.program.tasks) for rank_class in job.classes]
        ready_s, start_s, stop_s = ([[math.inf] * size for size in sizes] for _ in range(3))
        causes: list[list[TaskId | None]] = [[None] * size for size in sizes]
        return cls(ready_s, start_s, stop_s, causes, sum(sizes))

    def ready(self, task: TaskId, now: float) -> None:
        """Note that a task could begin, as far as its own rank goes."""
        self.ready_s[task[0]][task[1]] = now

    def start(self, task: TaskId, now: float, cause: TaskId | None) -> None:
        """Note that a task begins."""
        self.start_s[task[0]][task[1]] = now
        self.causes[task[0]][task[1]] = cause

    def stop(self, task: TaskId, now: float) -> None:
        """Note that a task ends."""
        self.stop_s[task[0]][task[1]] = now
        self.num_left -= 1

    def has_stopped(self, task: TaskId) -> bool:
        """Whether a task has ended."""
        return self.stop_s[task[0]][task[1]] < math.inf

    def is_ready(self, task: TaskId) -> bool:
        """Whether a task waits for other ranks only."""
        return self.ready_s[task[0]][task[1]] < math.inf


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


Head = tuple[int, str, str]
"""A collective, and the queue and name of its task."""


def check_issue_order(programs: Programs, cluster: Cluster) -> None:
    """Prove that one order of all collectives fits every rank, whatever queues they are on.

    Every device is assumed to run one collective at a time, in the order of its program. If all
    collectives can run so, no timing can make them wait for each other. Local.

    Args:
        programs: Tasks by rank, in the order in which the host issues them.
        cluster: Rails and communicators.

    Raises:
        DivergenceError: There is no such order; names the first pair and the ranks.
        ConfigError, TopologyError: For the reasons of `simulate`.
    """
    job = classify(programs, cluster, collapse=True)
    orders = [
        [
            (m, t.queue, t.name)
            for m, t in zip(a.collectives, a.program.tasks, strict=True)
            if m >= 0
        ]
        for a in job.classes
    ]
    done = [0] * len(orders)
    present = [0] * len(job.collectives)
    todo = deque(range(len(orders)))
    while todo:
        rank_class = todo.popleft()
        if done[rank_class] == len(orders[rank_class]):
            continue
        collective = orders[rank_class][done[rank_class]][0]
        members = job.collectives[collective].members
        present[collective] += 1
        if present[collective] == len(members):
            for member in members:
                done[member] += 1
            todo.extend(members)
    left = [order[count:] for order, count in zip(orders, done, strict=True)]
    if any(left):
        raise _error(job, left)


def _error(job: SimulatedJob, left: list[list[Head]]) -> DivergenceError:
    ranks = [rank_text(rank_class.ranks) for rank_class in job.classes]
    rank_class = next(a for a, order in enumerate(left) if order)
    head = left[rank_class][0]
    # Every collective at a head lacks a member that is held by another: following them from rank
    # to rank ends at one that never comes, or comes back.
    seen: list[tuple[int, Head]] = []
    found = ""
    while not found:
        seen.append((rank_class, head))
        members = job.collectives[head[0]].members
        other = next(a for a in members if not left[a] or left[a][0] != head)
        if members[other] is None:
            found = f"{_text(head)} is in the program of {ranks[rank_class]}, not of {ranks[other]}"
        elif head in left[other] and left[other][0] in left[rank_class]:
            theirs = left[other][0]
            found = (
                f"{_text(head)} comes before {_text(theirs)} on {ranks[rank_class]}, "
                f"after it on {ranks[other]}"
            )
        else:
            rank_class, head = other, left[other][0]
            places = [place for place, (a, _) in enumerate(seen) if a == rank_class]
            if places:
                chain = ", ".join(f"{_text(h)} on {ranks[a]}" for a, h in seen[places[0] :])
                found = f"no two ranks differ, but each of these waits for the next: {chain}"
    return DivergenceError(
        "check_issue_order",
        found=found,
        why="Operations on several communicators of one device must be submitted in the same order "
        "on every rank, or the ranks can wait for each other for ever.",
        fix="Build the programs of all ranks from one schedule, and issue it in its order.",
    )


def _text(head: Head) -> str:
    return f"{head[2]!r} on {head[1]!r}"
