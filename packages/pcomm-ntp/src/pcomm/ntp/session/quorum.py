"""How the ranks of a generation decide what follows it, when some of them may be gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pcomm.core.errors import DivergenceError
from pcomm.ntp.session.failure_detection import ExitReports, HeartbeatTimeout
from pcomm.ntp.session.records import Decision, Records
from pcomm.ntp.session.resume_point import RankState

__all__ = ["Quorum", "Timeouts", "states_before"]

_PAUSE_S = 0.005


@dataclass(frozen=True)
class Timeouts:
    """How long a session waits for what; each limit is longer than those above it.

    Args:
        heartbeat_s: Seconds between two heartbeats of a rank.
        dead_after_s: Seconds without a heartbeat after which a rank is excluded unless it comes
            before the others have decided, or without a connection between two ranks. The heartbeat
            is a Python thread: more than the longest call that holds Python's interpreter lock,
            such as of a tokenizer or a compiler.
        leave_s: Seconds that a rank with a heartbeat, or without any yet in generation 0, has to
            join the quorum; after that it is excluded, too. More than the longest stretch of
            computation between two collectives.
        agree_s: Seconds that the ranks have to agree, and as many to connect, in a new generation;
            and those after which a store whose host sends nothing is lost.
        operation_s: Seconds after which an operation between ranks ends by itself.
        join_s: Seconds that a new process waits until it is taken in, and a rank that is through
            for the others. More than a step takes.
    """

    heartbeat_s: float = 0.5
    dead_after_s: float = 10.0
    leave_s: float = 60.0
    agree_s: float = 120.0
    operation_s: float = 600.0
    join_s: float = 3600.0


class Quorum:
    """The ranks of a generation that decide what follows it. Collective over those that live.

    Each rank says what state it has. Once every rank has done so or is known to be gone, one of
    them proposes what follows, and the first proposal counts. No majority is needed, since the
    store, which all share, takes one proposal alone.

    Args:
        records: Records of the session.
        exits: Exits of processes that the launcher told.
        generation: Number of the generation that the ranks leave.
        ranks: Its ranks.
        incarnations: Number of processes that had a rank before the one of now, by rank.
        timeouts: Time limits.
        processes: By rank, the number of its process where that is a spare.
    """

    def __init__(
        self,
        records: Records,
        exits: ExitReports,
        generation: int,
        ranks: Sequence[int],
        incarnations: Mapping[int, int],
        timeouts: Timeouts,
        processes: Mapping[int, int] | None = None,
    ) -> None:
        self._records, self._exits, self._timeouts = records, exits, timeouts
        self.generation, self.ranks = generation, tuple(ranks)
        self._incarnations, self._processes = incarnations, processes
        self._heartbeats = HeartbeatTimeout(2 * timeouts.heartbeat_s)

    def attend(
        self,
        rank: int,
        state: RankState,
        propose: Callable[[Sequence[int], Mapping[int, str]], Decision],
        check_store: Callable[[], None],
    ) -> Decision:
        """Say what this rank has, and wait for the decision.

        Args:
            rank: Global rank of this process.
            state: State of this rank, which must not change before the decision.
            propose: Function from the ranks that are there, and from those that are not with the
                reasons, to what should follow.
            check_store: Function that raises when the store is lost.
        """
        self._records.say(self.generation, rank, state)
        end_s = time.monotonic() + self._timeouts.leave_s
        while True:
            check_store()
            if (decision := self._records.decision(self.generation)) is not None:
                return decision
            here = self._records.said(self.generation, self.ranks)
            self._exits.read()
            missing = [r for r in self.ranks if r not in here and not self._is_gone(r)]
            if not missing or time.monotonic() > end_s:
                living = self._living(here, rank)
                gone = {r: self._reason(r) for r in self.ranks if r not in living}
                return self._records.decide(self.generation, propose(living, gone))
            time.sleep(_PAUSE_S)

    def _living(self, here: Mapping[int, RankState], rank: int) -> list[int]:
        """Those that have arrived, and neither ended nor left since.

        A rank that was silent for too long and has come before the decision lives.
        """
        return [r for r in here if r == rank or not self._how_it_ended(r)]

    def _how_it_ended(self, rank: int) -> str | None:
        """How a rank has ended or left, or None."""
        ended = self._exits.of(rank, self._incarnations, self._processes)
        return ended or self._records.left(self.generation, rank)

    def _told(self, rank: int) -> str | None:
        return self._how_it_ended(rank) or self._records.silent(self.generation, rank)

    def _reason(self, rank: int) -> str:
        """Why a rank is gone."""
        return self._told(rank) or (
            "its heartbeat has stopped" if self._is_gone(rank) else "did not leave its work in time"
        )

    def _is_gone(self, rank: int) -> bool:
        if self._told(rank) is not None:
            return True
        beat = self._records.beat_of(self.generation, rank)
        if not beat and self.generation == 0:
            # Not silent but late to begin, as for `Watch`; `leave_s` is its limit here.
            return False
        silent_s = self._heartbeats.look(rank, beat, time.monotonic())
        return silent_s >= self._timeouts.dead_after_s


def states_before(
    records: Records, number: int, decision: Decision, check_fence: Callable[[], None]
) -> dict[int, RankState]:
    """What those ranks of the next generation said that were in generation `number`. Local.

    Raises:
        FencedError: That of `check_fence`: a later generation is complete without this rank, and
            what was said before is deleted.
    """
    there = [rank for rank in decision.ranks if rank not in decision.newcomers]
    found = records.said(number, there)
    if len(found) == len(there):
        return found
    check_fence()
    raise DivergenceError(
        f"Session: the end of generation {number}",
        found=f"no state of ranks {[r for r in there if r not in found]}",
        why="A rank says what state it has before it is decided that it goes on.",
        fix="Start the job again from its last checkpoint, and report this.",
    )
