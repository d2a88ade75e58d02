"""What is simulated: a cluster of ranks with its rails, tasks with their cost, and their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pcomm.core.errors import ConfigError, TopologyError, near_misses

__all__ = [
    "Algorithm",
    "Cluster",
    "Kind",
    "Load",
    "Program",
    "Programs",
    "Rail",
    "SimulatedCommunicator",
    "Task",
    "loads",
    "resolve",
]


Algorithm = Literal["ring", "direct", "in_network"]


@dataclass(frozen=True)
class Rail:
    """One network on which every rank has a port of its own, behind a switch that never blocks.

    Args:
        name: Name such as `nvlink` or `nic0`.
        bytes_per_s: Bandwidth of a port in each direction; of both together if not full duplex.
        latency_s: Time of one step of an algorithm, without the bytes, in seconds.
        full_duplex: True if sending and receiving at once cost each other nothing.
        processor_bytes_per_s: What a rank could send, receiving as much, if the processor that
            computes had to do it and nothing else: computing and sending then share that
            processor. Infinite where it has no part in it, as with NCCL.

    Raises:
        ConfigError: A bandwidth that is not above zero, or a negative latency.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    full_duplex: bool = True
    processor_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        rates = self.bytes_per_s, self.processor_bytes_per_s
        if not (min(rates) > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(
                f"Rail {self.name!r}",
                found=f"bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}, "
                f"processor_bytes_per_s={self.processor_bytes_per_s}",
                why="A collective would never end, or would end before it began.",
                fix="Use a bandwidth above zero and a finite latency from zero on.",
            )


@dataclass(frozen=True)
class SimulatedCommunicator:
    """One queue of every rank, and the groups whose collectives run on it.

    Args:
        queue: Name of the queue, as tasks use it: group and role, such as `dp:gather`.
        rail: Name of the rail that carries it. Communicators on one rail share its bandwidth.
        groups: Ranks of each group, in order; a rank is in one of them at most.
        algorithm: Algorithm that moves the bytes, see `pcomm.core.simulate.program`.

    Raises:
        TopologyError: A rank occurs twice, or a group is empty.
        ConfigError: An unknown algorithm.
    """

    queue: str
    rail: str
    groups: tuple[tuple[int, ...], ...]
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(
                f"SimulatedCommunicator {self.queue!r}",
                found=f"algorithm {self.algorithm!r}",
                why="The cost model has formulas for the algorithms that it knows.",
                fix=near_misses(self.algorithm, get_args(Algorithm)),
            )
        ranks = [rank for group in self.groups for rank in group]
        if len(set(ranks)) < len(ranks) or not all(self.groups):
            raise TopologyError(
                f"SimulatedCommunicator {self.queue!r}",
                found=f"groups {list(self.groups)}",
                why="A rank has one queue for a communicator, and every group has a member.",
                fix="Give disjoint groups, or one communicator for each set of groups.",
            )


@dataclass(frozen=True)
class Cluster:
    """Rails and the communicators on them.

    Args:
        rails: Rails with unique names.
        communicators: Communicators with unique queues.

    Raises:
        ConfigError: A name occurs twice, or a communicator names a rail that is not there.
    """

    rails: Sequence[Rail]
    communicators: Sequence[SimulatedCommunicator]

    def __post_init__(self) -> None:
        for names in ([r.name for r in self.rails], [c.queue for c in self.communicators]):
            if len(set(names)) < len(names):
                raise ConfigError(
                    "Cluster",
                    found=f"names {names}",
                    why="Tasks find their queue, and queues their rail, by name.",
                    fix="Give every rail and every communicator a name of its own.",
                )
        known = [rail.name for rail in self.rails]
        for communicator in self.communicators:
            if communicator.rail not in known:
                raise ConfigError(
                    f"Cluster: communicator {communicator.queue!r}",
                    found=f"rail {communicator.rail!r}",
                    why="Its bandwidth is not described.",
                    fix=near_misses(communicator.rail, known),
                )

    def rail(self, name: str) -> Rail:
        """The rail of that name."""
        return next(rail for rail in self.rails if rail.name == name)


Kind = Literal["compute", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True)
class Task:
    """One step of the program of a rank, on one of its queues.

    A queue takes its tasks one at a time, in the order of the program, like a CUDA stream or the
    stream of an NCCL communicator. A task begins when the task before it on its queue and all
    tasks that it names in `after` have ended; a collective begins when that is so on every rank
    of its group. Collectives meet by queue and name.

    Args:
        name: Unique within the program of the rank.
        queue: `compute` or any other name; for a collective the queue of a
            `SimulatedCommunicator`.
        kind: `compute`, or the operation.
        seconds: Duration of a `compute` task, in seconds.
        num_bytes: Bytes that this rank puts into a collective: its shard for `all_gather`, the
            whole buffer for all others. Ranks may differ in `all_gather` and `all_to_all`.
        after: Names of tasks of the same rank that must have ended.
        source: Place of the sender of a `broadcast` within the group.

    Raises:
        ConfigError: An unknown kind, or a time or size that is negative or not finite, or that
            does not belong to the kind.
    """

    name: str
    queue: str
    kind: Kind
    seconds: float = 0.0
    num_bytes: float = 0.0
    after: tuple[str, ...] = ()
    source: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"Task {self.name!r}",
                found=f"kind {self.kind!r}",
                why="The cost model has one formula for each operation that it knows.",
                fix=f"Use one of {', '.join(get_args(Kind))}.",
            )
        unused = self.num_bytes if self.kind == "compute" else self.seconds
        if unused or not (_is_amount(self.seconds) and _is_amount(self.num_bytes)):
            raise ConfigError(
                f"Task {self.name!r}",
                found=f"kind {self.kind!r}, seconds={self.seconds}, num_bytes={self.num_bytes}",
                why="Computing takes seconds, a collective moves bytes, and time runs forward.",
                fix="Give seconds to `compute`, num_bytes to a collective; finite, from 0 on.",
            )

    @property
    def is_collective(self) -> bool:
        """Whether it meets other ranks."""
        return self.kind != "compute"


Programs = Mapping[int, Sequence[Task]]
"""The tasks of every rank in the order in which its host issues them. Ranks that do the same
should share one sequence: `dict.fromkeys(range(64), program)`."""


def _is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0


class Load(NamedTuple):
    """Bytes that one member of a collective sends and receives."""

    sent_bytes: float
    received_bytes: float


def loads(
    operation: Kind, algorithm: Algorithm, num_bytes: Sequence[float], source: int = 0
) -> tuple[int, list[Load]]:
    """Number of steps, and the load of each member.

    Args:
        operation: Name of the collective.
        algorithm: Algorithm that moves its bytes.
        num_bytes: Bytes that each member puts in, in group order.
        source: Place of the sender of a broadcast.
    """
    size = len(num_bytes)
    if size == 1:
        return 0, [Load(0.0, 0.0)]
    steps = size - 1 if algorithm == "ring" else 1
    total = sum(num_bytes)
    if operation == "all_gather":
        if algorithm == "ring":
            # The ring moves in lock step, so each step lasts as long as its largest shard.
            return steps, [Load(steps * max(num_bytes), steps * max(num_bytes))] * size
        copies = size - 1 if algorithm == "direct" else 1
        return steps, [Load(copies * b, total - b) for b in num_bytes]
    if operation == "all_to_all":
        return steps, [Load(b * (size - 1) / size, (total - b) / size) for b in num_bytes]
    b = num_bytes[0]
    if operation == "broadcast":
        return steps, _broadcast(algorithm, b, size, source)
    others = b * (size - 1) / size
    if operation == "reduce_scatter":
        return steps, [Load(others, b / size if algorithm == "in_network" else others)] * size
    if algorithm == "in_network":
        return 1, [Load(b, b)] * size
    return 2 * steps, [Load(2 * others, 2 * others)] * size


def _broadcast(algorithm: Algorithm, b: float, size: int, source: int) -> list[Load]:
    sent = [0.0] * size
    received = [b] * size
    received[source] = 0.0
    if algorithm == "ring":
        sent = [b] * size
        sent[source - 1] = 0.0
    else:
        sent[source] = b * (size - 1) if algorithm == "direct" else b
    return [Load(*pair) for pair in zip(sent, received, strict=True)]


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
