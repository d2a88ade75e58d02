"""One step of the program of a rank, as data: computing, or a collective on a queue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pcomm.core.errors import ConfigError

__all__ = ["Kind", "Programs", "Task"]

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
