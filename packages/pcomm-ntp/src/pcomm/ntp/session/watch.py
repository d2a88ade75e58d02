"""The thread of a rank: it beats, watches a neighbour, and hears when the others leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from pcomm.core.errors import PeerError
from pcomm.ntp.session.evidence import Ends, Silence
from pcomm.ntp.session.reach import Reach
from pcomm.ntp.session.records import Records

__all__ = ["Watch"]

# Between two looks at the flag; what else is read is read once in as many looks.
_LOOK_S, _LOOKS_PER_READ = 0.02, 5


@dataclass(frozen=True)
class _Watched:
    """What is watched: a generation, its ranks, and when their processes began (see `Ends`)."""

    generation: int
    ranks: tuple[int, ...]
    incarnations: Mapping[int, int] = field(default_factory=dict)


class Watch:
    """A daemon thread with a connection to the store of its own.

    It writes this rank's heartbeat, reads that of the next rank, and reads ends of processes and
    the flag of the generation. What it finds raises the flag, and `failure` tells.

    Args:
        connect: Function that makes a new connection to the store.
        rank: Global rank of this process.
        heartbeat_s: Seconds between two heartbeats.
        dead_after_s: Seconds without a heartbeat after which a neighbour is told to be silent.

    Attributes:
        lost: Error of the store; None while it answers.
        reach: Socket by which other ranks try whether they reach this one.
        step: Number of the step that this rank attempts; None before the first of a generation.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        *,
        heartbeat_s: float,
        dead_after_s: float,
    ) -> None:
        self._records, self._rank = Records(connect()), rank
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._ends = Ends(self._records.store)
        self._silence = Silence(2 * heartbeat_s)
        self._watched: _Watched | None = None
        self._told: tuple[int, str] | None = None
        self._stop = threading.Event()
        self.lost: Exception | None = None
        self.reach = Reach()
        self.step: int | None = None
        # Generation in which a rank has no step left, that rank, and its number of steps.
        self._over: tuple[int, int, int] | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"pcomm session of rank {rank}", daemon=True
        )
        self._thread.start()

    def enter(
        self, generation: int, ranks: tuple[int, ...], incarnations: Mapping[int, int]
    ) -> None:
        """Watch the ranks of a generation from now on. Local."""
        self.step = None
        self._watched = _Watched(generation, ranks, dict(incarnations))

    def failure(self) -> str | None:
        """Why the ranks of the generation leave it, or None. Local; reads nothing."""
        if self.lost is not None:
            return f"the store does not answer: {self.lost}"
        told, watched = self._told, self._watched
        if told and watched and told[0] == watched.generation:
            return told[1]
        return self.ended()

    def ended(self) -> str | None:
        """Which rank has ended before the step that this one attempts, or None. Local."""
        over, watched, step = self._over, self._watched, self.step
        if over is None or watched is None or step is None:
            return None
        generation, rank, applied = over
        if generation != watched.generation or applied > step:
            return None
        return f"rank {rank} has ended after {applied} steps"

    def check(self) -> None:
        """Raise `PeerError` if the ranks leave the generation. Local; reads nothing."""
        if (message := self.failure()) is not None:
            raise PeerError(
                "Session",
                found=message,
                why="The ranks of this generation meet, and none goes on alone.",
                fix="Nothing: the session begins the next generation.",
            )

    def close(self) -> None:
        """End the thread. It reads the store at most once more."""
        self._stop.set()
        self._thread.join(2 * self._heartbeat_s + 1)
        self.reach.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        looks, beats, next_beat_s = 0, 0, 0.0
        try:
            while not self._stop.wait(_LOOK_S):
                self.reach.drain()
                watched, now_s = self._watched, time.monotonic()
                # Who waits to join does not beat: its rank may have a process that is silent.
                if watched is not None and now_s >= next_beat_s:
                    beats, next_beat_s = beats + 1, now_s + self._heartbeat_s
                    self._records.beat(watched.generation, self._rank, beats)
                    self._look_at_neighbour(watched, now_s)
                if watched is not None:
                    self._look(watched, reads_all=looks % _LOOKS_PER_READ == 0)
                looks += 1
        except Exception as error:
            # The store is the only thing that is called here.
            if not self._stop.is_set():
                self.lost = error

    def _look(self, watched: _Watched, *, reads_all: bool) -> None:
        if self._told is not None and self._told[0] == watched.generation:
            return
        if reads_all:
            if (over := self._records.over(watched.generation)) is not None:
                self._over = watched.generation, *over
            self._ends.read()
            for rank in watched.ranks:
                if (reason := self._ends.of(rank, watched.incarnations)) is not None:
                    message = f"rank {rank} has ended: {reason}"
                    self._records.raise_flag(watched.generation, message)
        message_of_flag = self._records.flag(watched.generation)
        if message_of_flag is not None:
            self._told = watched.generation, message_of_flag

    def _look_at_neighbour(self, watched: _Watched, now_s: float) -> None:
        if len(watched.ranks) < 2 or self._rank not in watched.ranks:
            return
        following = (watched.ranks.index(self._rank) + 1) % len(watched.ranks)
        rank = watched.ranks[following]
        beat = self._records.beat_of(watched.generation, rank)
        if not beat and watched.generation == 0:
            # Not silent but late to begin: the agreement to open the groups has a limit for that.
            return
        silent_s = self._silence.look(rank, beat, now_s)
        if silent_s >= self._dead_after_s:
            message = f"no heartbeat for {silent_s:.1f} s"
            self._records.say_silent(watched.generation, rank, message)
            self._records.raise_flag(watched.generation, f"rank {rank}: {message}")
