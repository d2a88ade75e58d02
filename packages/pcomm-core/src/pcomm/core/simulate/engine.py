"""Runs programs in virtual time: no clock, no threads, the same answer every time.

Time jumps from event to event. A collective begins when all members have reached it, spends its
steps at the latency of the rail, then moves its bytes at the rate that its ports leave it; rates
change only when a transfer begins or ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pcomm.core.simulate.cluster import Cluster, Rail
from pcomm.core.simulate.deadlock import deadlock
from pcomm.core.simulate.rank_classes import MatchedCollective, SimulatedJob, classify
from pcomm.core.simulate.sharing import Port, Ports
from pcomm.core.simulate.task import Programs
from pcomm.core.simulate.task_times import TaskId, TaskTimes
from pcomm.core.simulate.timeline import Timeline

__all__ = ["simulate"]


def simulate(programs: Programs, cluster: Cluster, *, collapse: bool = True) -> Timeline:
    """When each task of each rank runs, if the cluster is as described.

    The result is a prediction of a model, never a measurement. Local: no communication happens.

    Args:
        programs: Tasks by rank.
        cluster: Rails and communicators.
        collapse: Run ranks that behave alike only once. The times are the same without it.

    Raises:
        DeadlockError: Tasks are left that wait for each other.
        ConfigError, TopologyError, DivergenceError: Programs and cluster do not fit together, see
            `pcomm.core.simulate.rank_classes.classify`.
    """
    job = classify(programs, cluster, collapse=collapse)
    times = TaskTimes.of(job)
    _Engine(job, cluster, times).play()
    if times.num_left:
        raise deadlock(job, times)
    return Timeline(job, times)


@dataclass
class _Transfer:
    """A collective that moves bytes: what is left, in seconds that it would take alone."""

    left_s: float
    since_s: float
    rate: float = 0.0
    stop_s: float = math.inf

    def proceed(self, now: float, rate: float) -> None:
        if rate != self.rate:
            self.left_s = max(0.0, self.left_s - self.rate * (now - self.since_s))
            self.since_s, self.rate = now, rate
            self.stop_s = now + self.left_s / rate


class _Engine:
    """The state of one run between two events."""

    def __init__(self, job: SimulatedJob, cluster: Cluster, times: TaskTimes) -> None:
        self._job, self._times = job, times
        self._rails = {rail.name: rail for rail in cluster.rails}
        self._absent = [len(collective.members) for collective in job.collectives]
        self._needs = [[len(n) for n in a.program.needs] for a in job.classes]
        self._ports = Ports()
        self._transfers: dict[int, _Transfer] = {}
        self._changed: set[int] = set()
        # Ends of computing (rank class, place) and of latencies (-1, collective); the time decides,
        # and the numbers only make the order of simultaneous ends the same every time.
        self._ends: list[tuple[float, int, int]] = []
        self._now = 0.0

    def play(self) -> None:
        """Until nothing runs any more."""
        for rank_class, needs in enumerate(self._needs):
            for place, count in enumerate(needs):
                if not count:
                    self._ready((rank_class, place), None)
        while True:
            for collective, rate in sorted(self._ports.rates(self._changed).items()):
                self._transfers[collective].proceed(self._now, rate)
            self._changed.clear()
            stop_s = min((t.stop_s for t in self._transfers.values()), default=math.inf)
            if self._ends:
                stop_s = min(stop_s, self._ends[0][0])
            if stop_s == math.inf:
                return
            self._now = stop_s
            self._advance()

    def _advance(self) -> None:
        """Handle all that ends now."""
        for collective in [m for m, t in self._transfers.items() if t.stop_s <= self._now]:
            del self._transfers[collective]
            self._changed |= self._ports.stop(collective)
            self._finish_collective(collective)
        while self._ends and self._ends[0][0] <= self._now:
            _, rank_class, place = heapq.heappop(self._ends)
            if rank_class < 0:
                self._move(place)
            else:
                self._finish((rank_class, place))

    def _ready(self, task: TaskId, cause: TaskId | None) -> None:
        """All that a task needs has ended, `cause` last."""
        rank_class, place = task
        self._times.ready(task, self._now)
        collective = self._job.classes[rank_class].collectives[place]
        if collective < 0:
            seconds = self._job.classes[rank_class].program.tasks[place].seconds
            self._times.start(task, self._now, cause)
            heapq.heappush(self._ends, (self._now + seconds, rank_class, place))
            return
        self._absent[collective] -= 1
        if not self._absent[collective]:
            spec = self._job.collectives[collective]
            for member in spec.tasks():
                self._times.start(member, self._now, cause)
            latency_s = spec.num_steps * self._rails[spec.communicator.rail].latency_s
            heapq.heappush(self._ends, (self._now + latency_s, -1, collective))

    def _move(self, collective: int) -> None:
        spec = self._job.collectives[collective]
        seconds, use = _use(spec, self._rails[spec.communicator.rail])
        if seconds:
            self._ports.start(collective, use)
            self._transfers[collective] = _Transfer(seconds, self._now)
            self._changed.add(collective)
        else:
            self._finish_collective(collective)

    def _finish_collective(self, collective: int) -> None:
        self._changed.discard(collective)
        for task in self._job.collectives[collective].tasks():
            self._finish(task)

    def _finish(self, task: TaskId) -> None:
        rank_class, place = task
        self._times.stop(task, self._now)
        needs = self._needs[rank_class]
        for follower in self._job.classes[rank_class].program.followers[place]:
            needs[follower] -= 1
            if not needs[follower]:
                self._ready((rank_class, follower), task)


def _use(collective: MatchedCollective, rail: Rail) -> tuple[float, Mapping[Port, float]]:
    """Seconds that a transfer takes alone, and the share of each port that it then uses."""
    seconds: dict[Port, float] = {}
    for rank_class, (sent, received) in collective.loads.items():
        if rail.full_duplex:
            seconds[Port(rail.name, rank_class, "send")] = sent / rail.bytes_per_s
            seconds[Port(rail.name, rank_class, "receive")] = received / rail.bytes_per_s
        else:
            seconds[Port(rail.name, rank_class, "both")] = (sent + received) / rail.bytes_per_s
    longest = max(seconds.values())
    return longest, {port: own / longest for port, own in seconds.items() if own}
