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
from pcomm.core.simulate.rank_classes import Cast, Meeting, cast
from pcomm.core.simulate.run import Run, TaskId
from pcomm.core.simulate.sharing import Port, Ports
from pcomm.core.simulate.task import Programs
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
            `pcomm.core.simulate.rank_classes.cast`.
    """
    players = cast(programs, cluster, collapse=collapse)
    run = Run.of(players)
    _Engine(players, cluster, run).play()
    if run.num_left:
        raise deadlock(players, run)
    return Timeline(players, run)


@dataclass
class _Transfer:
    """A meeting that moves bytes: what is left, in seconds that it would take alone."""

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

    def __init__(self, players: Cast, cluster: Cluster, run: Run) -> None:
        self._cast, self._run = players, run
        self._rails = {rail.name: rail for rail in cluster.rails}
        self._absent = [len(meeting.members) for meeting in players.meetings]
        self._needs = [[len(n) for n in a.program.needs] for a in players.actors]
        self._ports = Ports()
        self._transfers: dict[int, _Transfer] = {}
        self._changed: set[int] = set()
        # Ends of computing (actor, place) and of latencies (-1, meeting); the time decides, and
        # the numbers only make the order of simultaneous ends the same every time.
        self._ends: list[tuple[float, int, int]] = []
        self._now = 0.0

    def play(self) -> None:
        """Until nothing runs any more."""
        for actor, needs in enumerate(self._needs):
            for place, count in enumerate(needs):
                if not count:
                    self._ready((actor, place), None)
        while True:
            for meeting, rate in sorted(self._ports.rates(self._changed).items()):
                self._transfers[meeting].proceed(self._now, rate)
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
        for meeting in [m for m, t in self._transfers.items() if t.stop_s <= self._now]:
            del self._transfers[meeting]
            self._changed |= self._ports.stop(meeting)
            self._finish_meeting(meeting)
        while self._ends and self._ends[0][0] <= self._now:
            _, actor, place = heapq.heappop(self._ends)
            if actor < 0:
                self._move(place)
            else:
                self._finish((actor, place))

    def _ready(self, task: TaskId, cause: TaskId | None) -> None:
        """All that a task needs has ended, `cause` last."""
        actor, place = task
        self._run.ready(task, self._now)
        meeting = self._cast.actors[actor].meetings[place]
        if meeting < 0:
            seconds = self._cast.actors[actor].program.tasks[place].seconds
            self._run.start(task, self._now, cause)
            heapq.heappush(self._ends, (self._now + seconds, actor, place))
            return
        self._absent[meeting] -= 1
        if not self._absent[meeting]:
            spec = self._cast.meetings[meeting]
            for member in spec.tasks():
                self._run.start(member, self._now, cause)
            latency_s = spec.num_steps * self._rails[spec.communicator.rail].latency_s
            heapq.heappush(self._ends, (self._now + latency_s, -1, meeting))

    def _move(self, meeting: int) -> None:
        spec = self._cast.meetings[meeting]
        seconds, use = _use(spec, self._rails[spec.communicator.rail])
        if seconds:
            self._ports.start(meeting, use)
            self._transfers[meeting] = _Transfer(seconds, self._now)
            self._changed.add(meeting)
        else:
            self._finish_meeting(meeting)

    def _finish_meeting(self, meeting: int) -> None:
        self._changed.discard(meeting)
        for task in self._cast.meetings[meeting].tasks():
            self._finish(task)

    def _finish(self, task: TaskId) -> None:
        actor, place = task
        self._run.stop(task, self._now)
        needs = self._needs[actor]
        for follower in self._cast.actors[actor].program.followers[place]:
            needs[follower] -= 1
            if not needs[follower]:
                self._ready((actor, follower), task)


def _use(meeting: Meeting, rail: Rail) -> tuple[float, Mapping[Port, float]]:
    """Seconds that a transfer takes alone, and the share of each port that it then uses."""
    seconds: dict[Port, float] = {}
    for actor, (sent, received) in meeting.loads.items():
        if rail.full_duplex:
            seconds[Port(rail.name, actor, "send")] = sent / rail.bytes_per_s
            seconds[Port(rail.name, actor, "receive")] = received / rail.bytes_per_s
        else:
            seconds[Port(rail.name, actor, "both")] = (sent + received) / rail.bytes_per_s
    longest = max(seconds.values())
    return longest, {port: own / longest for port, own in seconds.items() if own}
