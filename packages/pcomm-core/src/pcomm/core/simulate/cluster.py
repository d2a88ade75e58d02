"""The cluster that a simulation runs on: rails, and which communicator uses which rail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, TopologyError, near_misses

__all__ = ["Algorithm", "Cluster", "Rail", "SimulatedCommunicator"]

Algorithm = Literal["ring", "direct", "in_network"]


@dataclass(frozen=True)
class Rail:
    """One network on which every rank has a port of its own, behind a switch that never blocks.

    Args:
        name: Name such as `nvlink` or `nic0`.
        bytes_per_s: Bandwidth of a port in each direction; of both together if not full duplex.
        latency_s: Time of one step of an algorithm, without the bytes, in seconds.
        full_duplex: True if sending and receiving at once cost each other nothing.

    Raises:
        ConfigError: A bandwidth that is not above zero, or a negative latency.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(
                f"Rail {self.name!r}",
                found=f"bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}",
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
        algorithm: Algorithm that moves the bytes, see `pcomm.core.simulate.cost`.

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
