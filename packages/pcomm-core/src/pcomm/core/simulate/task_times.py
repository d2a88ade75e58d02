"""When every task of every rank class became ready, began and ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pcomm.core.simulate.rank_classes import SimulatedJob

__all__ = ["TaskId", "TaskTimes"]

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
