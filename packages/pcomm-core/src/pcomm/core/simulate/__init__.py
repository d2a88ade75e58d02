"""Schedules run in virtual time on a cluster that is only described; start at `engine.simulate`."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.simulate.cluster import Algorithm, Cluster, Rail, SimulatedCommunicator
    from pcomm.core.simulate.deadlock import DeadlockError
    from pcomm.core.simulate.engine import simulate
    from pcomm.core.simulate.issue_order import check_issue_order
    from pcomm.core.simulate.task import Task
    from pcomm.core.simulate.task_times import TaskTimes
    from pcomm.core.simulate.timeline import Timeline

__all__ = [
    "Algorithm",
    "Cluster",
    "DeadlockError",
    "Rail",
    "SimulatedCommunicator",
    "Task",
    "TaskTimes",
    "Timeline",
    "check_issue_order",
    "simulate",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Algorithm": "cluster",
        "Cluster": "cluster",
        "DeadlockError": "deadlock",
        "Rail": "cluster",
        "SimulatedCommunicator": "cluster",
        "Task": "task",
        "TaskTimes": "task_times",
        "Timeline": "timeline",
        "check_issue_order": "issue_order",
        "simulate": "engine",
    },
)
