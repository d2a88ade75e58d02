"""Which ranks behave alike, so that one of them can be run for all.

Ranks with equal programs are alike unless the members of their groups are not. So ranks get a
colour by program, and colours are split by the colours met in each group until nothing changes
(colour refinement). Times follow from programs, arrivals in groups and shares of own ports alone,
and those are then the same for all ranks of a colour. A straggler in one of many groups thus
splits its own group off and leaves the others together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError, DivergenceError, TopologyError
from pcomm.core.simulate.cluster import Cluster, SimulatedCommunicator
from pcomm.core.simulate.cost import Load, loads
from pcomm.core.simulate.program import Program, resolve
from pcomm.core.simulate.task import Programs, Task

__all__ = ["MatchedCollective", "RankClass", "SimulatedJob", "classify"]

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
