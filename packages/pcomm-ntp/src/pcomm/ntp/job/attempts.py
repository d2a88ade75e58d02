"""A job in a store that outlives its ranks: who may enter, how often, and which attempt it is.

A launcher such as Slurm or Kubernetes starts a process for each rank, and starts it again when it
ends. Such a process knows neither whether it is the first of its rank nor whether the others live.
`enter_job` finds out in the store, so that the process can make a `Session`.

| key below `pcomm/job/` | says |
|---|---|
| `facts` | what the job is, as the first process has written it |
| `word` | a word that no other job has |
| `starts/RANK` | number of processes that had the rank |
| `short/RANK` | number of them in a row that did not last |
| `attempt` | number of the attempt that is under way |

All other keys of an attempt above 0 begin with a prefix of their own: a `Session` in it meets
nothing of the ones before. An attempt begins when the one before is over, or none of its ranks has
a heartbeat any more: all processes were started again, as when a whole job is requeued, and the
store has outlived them. Who still is of the attempt before is left behind by its `Session`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch.distributed as dist

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.process import RankPlace
from pcomm.ntp.session.records import Decision, Records, headline, store_errors

__all__ = ["TRY_AGAIN", "JobAttempt", "JobLimits", "enter_job"]

_log = logging.getLogger(__name__)

TRY_AGAIN: Final = os.EX_TEMPFAIL
"""Exit code of a process that its launcher shall start again: 75."""


@dataclass(frozen=True)
class JobLimits:
    """How patient a process is with the launcher and the other ranks.

    Args:
        silent_s: Seconds without a heartbeat of any rank after which another attempt begins. More
            than the longest call that holds Python's interpreter lock on all of them. Also those
            that a process may still live whose store has ended.
        settled_s: Seconds that a process has to live for its start to count no more.
        most_starts: Starts of a rank in a row that did not last so long; one more is refused.
        longest_pause_s: Seconds that a start waits at most. The second waits one, and each further
            one twice as long as the one before.
        look_s: Seconds between two looks at the store.
    """

    silent_s: float = 30.0
    settled_s: float = 60.0
    most_starts: int = 10
    longest_pause_s: float = 30.0
    look_s: float = 1.0


@contextmanager
def enter_job(
    place: RankPlace, facts: Mapping[str, str], limits: JobLimits | None = None
) -> Iterator[JobAttempt]:
    """Enter the job of a store for the time of a `with` block. Local.

    Waits for the store, compares the facts, and counts this start. In the block a thread ends this
    process, with a line in the log, when another one has taken its rank (exit code 2), when another
    attempt has begun without it, or the store has ended and the rank does not (exit code 75).

    Args:
        place: Place of this process; its `incarnation` and `prefix` are not read.
        facts: What must be the same on all ranks for the life of the store, such as the folder and
            the configuration.
        limits: Patience; None for the usual one.

    Raises:
        ConfigError: The store is that of a job with other facts; or processes of this rank end
            before they can meet the others, and are started again too often.
        PeerTimeoutError: There is no store within `PCOMM_TIMEOUT_S`.
        StoreLostError: The store has ended.
    """
    limits = limits or JobLimits()
    place.wait_for_store()
    place = replace(place, prefix="")
    with store_errors():
        store = place.store()
        _compare(place, store, facts)
        incarnation = int(store.add(f"pcomm/job/starts/{place.rank}", 1)) - 1
        _wait_after_short_lives(place.rank, store, limits)
        job = JobAttempt(replace(place, incarnation=incarnation), store, limits)
    try:
        yield job
    finally:
        job.leave()


class JobAttempt:
    """One attempt at a job, as one process of a rank sees it; made by `enter_job`.

    Attributes:
        word: A word that no other job has.
        number: Number of the attempt.
        finished: What `finish` was given where the job is done; then there is nothing to enter.
    """

    def __init__(self, place: RankPlace, store: dist.Store, limits: JobLimits) -> None:
        self._place, self._store, self._limits = place, store, limits
        made = uuid.uuid4().hex[:12]
        self.word = store.compare_set("pcomm/job/word", "", made).decode()
        store.compare_set("pcomm/job/attempt", "", "0")
        self.finished: str | None = None
        self.number = self._choose()
        self._own = self._place_in(self.number)
        self._keys = self._own.store()
        self._claim: str | None = None
        self._is_entered = False
        self._stop = threading.Event()
        # Connections of its own, made here: a store that ends is one that the thread has met.
        own = place.store(), self._own.store()
        self._thread = threading.Thread(target=self._watch, args=own, name="pcomm job", daemon=True)
        self._thread.start()

    # -- what a rank does in it ----------------------------------------------------------------

    def once(self, topic: str, work: Callable[[], str]) -> str:
        """What `work` returns on the one rank that does it. All ranks call it; they wait for it.

        If its process dies, another rank does it again.

        Args:
            topic: A word for the work, the same on all ranks.
            work: Local function.

        Raises:
            PcommError: The error of `work`, in the same words on all ranks that wait.
            StoreLostError: The store has ended.
        """
        with store_errors():
            turn = 0
            while self._keys.check([f"pcomm/once/{topic}/{turn}/error"]):
                turn += 1
            while True:
                key = f"pcomm/once/{topic}/{turn}"
                own = f"{self._place.rank} {uuid.uuid4().hex}"
                if self._keys.compare_set(f"{key}/who", "", own).decode() == own:
                    return self._work(key, work)
                told = self._wait_for(key)
                if told is not None:
                    return told
                turn += 1

    def enter(self) -> RankPlace:
        """The place for a `Session`, which is to be made at once. Local; again does nothing."""
        if self._is_entered:
            return self._own
        rank, key = self._place.rank, f"pcomm/job/entered/{self._place.rank}"
        with store_errors():
            if self._keys.check([key]):
                # As the launcher of `ResilientRanks` tells it.
                count = int(self._keys.add("pcomm/ended/count", 1))
                before = self._keys.get(key).decode()
                reason = "another process was started for it"
                self._keys.set(f"pcomm/ended/{count}", f"{rank} {before} {reason}")
            self._keys.set(key, str(self._place.incarnation))
            self._keys.add("pcomm/job/entered", 1)
        self._is_entered = True
        return self._own

    def finish(self, text: str) -> bool:
        """Tell that the job is done; returns whether this process is the first that does. Local.

        Args:
            text: What a process finds in `finished` that is started afterwards.
        """
        return self._end(f"finished {text}")

    def stop(self) -> bool:
        """Tell that the ranks have stopped on request, so that the next start begins anew. Local.

        Returns whether this process is the first that does.
        """
        return self._end("stopped ")

    def leave(self) -> None:
        """End the thread. Local; again does nothing."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._limits.look_s + 1)

    # -- which attempt it is -------------------------------------------------------------------

    def _place_in(self, number: int) -> RankPlace:
        """The place in an attempt. A launcher of `ResilientRanks` knows the first one alone."""
        return replace(self._place, prefix=f"pcomm/attempt/{number}" if number else "")

    def _choose(self) -> int:
        """The attempt that this process may enter; begins another one if that is over."""
        while True:
            number = self._newest(self._store)
            keys = self._place_in(number).store()
            if keys.check(["pcomm/job/over"]):
                kind, _, text = keys.get("pcomm/job/over").decode().partition(" ")
                if kind == "finished":
                    self.finished = text
                    return number
                self._advance(self._store, number)
            elif not self._has_been_entered(keys):
                return number
            else:
                beats = _Heartbeats(keys, self._place)
                while not beats.lives and self._newest(self._store) == number:
                    if keys.check(["pcomm/job/over"]):
                        break
                    if beats.silent_s >= self._limits.silent_s:
                        self._begin_after(self._store, number, beats)
                        break
                    time.sleep(min(0.2, self._limits.look_s))
                    beats.look()
                else:
                    if beats.lives:
                        return number

    def _newest(self, store: dist.Store) -> int:
        return int(store.get("pcomm/job/attempt"))

    def _advance(self, store: dist.Store, number: int) -> None:
        store.compare_set("pcomm/job/attempt", str(number), str(number + 1))

    def _begin_after(self, store: dist.Store, number: int, beats: _Heartbeats) -> None:
        """Begin another attempt, unless a rank of this one has moved meanwhile."""
        if beats.leave_behind():
            _log.warning(
                "no rank of attempt %d has had a heartbeat for %.0f s: the job begins another one",
                number,
                beats.silent_s,
            )
            self._advance(store, number)

    def _has_been_entered(self, keys: dist.Store) -> bool:
        return int(keys.add("pcomm/job/entered", 0)) > 0

    def _end(self, text: str) -> bool:
        self._stop.set()
        with store_errors():
            is_first = int(self._keys.add("pcomm/job/ends", 1)) == 1
            self._keys.compare_set("pcomm/job/over", "", text)
        return is_first

    # -- work of one rank ----------------------------------------------------------------------

    def _work(self, key: str, work: Callable[[], str]) -> str:
        self._claim = f"{key}/beat"
        try:
            result = work()
        except PcommError as error:
            parts = (error.asked, error.found, error.why, error.fix)
            self._keys.set(f"{key}/error", json.dumps(parts))
            raise
        except Exception as error:
            parts = (key, f"{type(error).__name__}: {error}", "It is done once.", "See its log.")
            self._keys.set(f"{key}/error", json.dumps(parts))
            raise
        finally:
            self._claim = None
        self._keys.set(f"{key}/done", json.dumps(result))
        return result

    def _wait_for(self, key: str) -> str | None:
        """What another rank has come to; None where its process is gone."""
        beat, silent_s, at_s = b"", 0.0, time.monotonic()
        while silent_s < self._limits.silent_s:
            if self._keys.check([f"{key}/done"]):
                return str(json.loads(self._keys.get(f"{key}/done")))
            if self._keys.check([f"{key}/error"]):
                who = self._keys.get(f"{key}/who").decode().split()[0]
                asked, found, why, fix = json.loads(self._keys.get(f"{key}/error"))
                raise ConfigError(asked, found=f"{found} (on rank {who})", why=why, fix=fix)
            time.sleep(min(0.1, self._limits.look_s))
            now = self._keys.get(f"{key}/beat") if self._keys.check([f"{key}/beat"]) else b""
            passed_s = min(time.monotonic() - at_s, 2 * self._limits.look_s)
            silent_s, at_s = silent_s + passed_s if now == beat else 0.0, time.monotonic()
            beat = now
        return None

    # -- the thread ----------------------------------------------------------------------------

    def _watch(self, root: dist.Store, keys: dist.Store) -> None:
        try:
            self._look_until_stopped(root, keys)
        except (dist.DistError, RuntimeError) as error:
            # The rank meets the same where it uses the store, unless it waits for what comes no
            # more, or has met the next store of that address, which knows nothing of it.
            if not self._stop.wait(self._limits.silent_s):
                self._give_up(TRY_AGAIN, f"the store has ended: {headline(error)}")

    def _look_until_stopped(self, root: dist.Store, keys: dist.Store) -> None:
        rank = self._place.rank
        beats: _Heartbeats | None = None
        count, is_settled, start_s = 0, False, time.monotonic()
        while not self._stop.wait(self._limits.look_s):
            newest = int(root.add(f"pcomm/job/starts/{rank}", 0)) - 1
            if newest > self._place.incarnation and not self._stop.is_set():
                self._give_up(
                    2,
                    f"another process has been started as rank {rank}, and takes its place: a "
                    "launcher gives each rank to one process at a time",
                )
            if self._newest(root) != self.number and not self._stop.is_set():
                self._give_up(TRY_AGAIN, "another attempt at the job has begun without it")
            if self._claim is not None:
                count += 1
                keys.set(self._claim, str(count))
            if not is_settled and time.monotonic() - start_s >= self._limits.settled_s:
                root.set(f"pcomm/job/short/{rank}", "0")
                is_settled = True
            if beats is None and self._has_been_entered(keys):
                beats = _Heartbeats(keys, self._place)
            if beats is not None and not (beats.has_own and self._is_entered):
                beats.look()
                if beats.silent_s >= self._limits.silent_s:
                    self._begin_after(root, self.number, beats)

    def _give_up(self, code: int, reason: str) -> None:
        """End this process: its main thread may wait for ranks that wait for it no more."""
        _log.error("rank %d ends with exit code %d: %s", self._place.rank, code, reason)
        os._exit(code)


class _Heartbeats:
    """The heartbeats of the ranks of a session, as one that looks on reads them.

    Attributes:
        lives: Whether one has changed.
        has_own: Whether that of this rank has changed.
        silent_s: Seconds since the last change, by looks at most two seconds apart.
    """

    def __init__(self, keys: dist.Store, place: RankPlace) -> None:
        self._records, self._place = Records(keys), place
        self._generation, self._ranks = 0, tuple(range(place.size))
        self._beats: dict[int, str] | None = None
        self._at_s = time.monotonic()
        self.lives = self.has_own = False
        self.silent_s = 0.0
        self.look()

    def look(self) -> None:
        """Read them again."""
        before, now_s = self._beats, time.monotonic()
        while (decision := self._decision()) is not None and not decision.is_end:
            self._generation, self._ranks, before = self._generation + 1, decision.ranks, None
        now = {rank: self._records.beat_of(self._generation, rank) for rank in self._ranks}
        changed = [rank for rank in now if before is not None and before[rank] != now[rank]]
        self.lives = self.lives or bool(changed)
        self.has_own = self.has_own or self._place.rank in changed
        quiet = before is not None and not changed
        self.silent_s = self.silent_s + min(now_s - self._at_s, 2.0) if quiet else 0.0
        self._beats, self._at_s = now, now_s

    def leave_behind(self) -> bool:
        """Have what may be left of the session find out that it goes on without it.

        Returns:
            False where its ranks have decided otherwise meanwhile.
        """
        reason = "no rank had a heartbeat, and another attempt at the job has begun"
        token = uuid.uuid4().hex
        ours = Decision(
            (self._place.rank,), {self._place.rank: token}, gone=dict.fromkeys(self._ranks, reason)
        )
        return self._records.decide(self._generation, ours).newcomers == ours.newcomers

    def _decision(self) -> Decision | None:
        return self._records.decision(self._generation)


def _compare(place: RankPlace, store: dist.Store, facts: Mapping[str, str]) -> None:
    """Refuse the store of another job."""
    own = json.dumps(dict(facts), sort_keys=True)
    of_job = json.loads(store.compare_set("pcomm/job/facts", "", own))
    others = [
        f"{name} is {facts.get(name, '(nothing)')} here and {of_job.get(name, '(nothing)')} there"
        for name in sorted({*facts, *of_job})
        if facts.get(name) != of_job.get(name)
    ]
    if others:
        raise ConfigError(
            f"rank {place.rank}: the store at {place.address}",
            found="that of another job: " + ", ".join(others),
            why="A store serves one job, and all of its ranks run the same with the same settings.",
            fix="Give the address of this job's own store, or start this rank as the others; a job "
            "with other settings gets a new store (`pcomm store`).",
        )


def _wait_after_short_lives(rank: int, store: dist.Store, limits: JobLimits) -> None:
    """Give the others time to meet where a launcher starts a rank again and again."""
    key = f"pcomm/job/short/{rank}"
    starts = int(store.add(key, 1))
    if starts > limits.most_starts:
        # The next start is the first of a new row: whatever was wrong may have been mended.
        store.set(key, "0")
        raise ConfigError(
            f"rank {rank} of the job",
            found=f"{starts} starts in a row, none of which lasted {limits.settled_s:g} s",
            why="A launcher that starts a process faster than the ranks can meet keeps all of them "
            "from their work.",
            fix="Look in its log for the error with which it ends each time, and mend that first.",
        )
    if starts > 1:
        pause_s = min(2.0 ** (starts - 2), limits.longest_pause_s)
        _log.warning("start %d of rank %d in a short time: it waits %g s", starts, rank, pause_s)
        time.sleep(pause_s)
