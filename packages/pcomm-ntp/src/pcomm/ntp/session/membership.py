"""Who belongs to a job now: entering, joining, forming quorums, being left behind. No tensors."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from pcomm.core.control import Control
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    FencedError,
    PeerError,
    PeerTimeoutError,
)
from pcomm.ntp.session.failure_detection import ExitReports, Watch, left_out, unreachable
from pcomm.ntp.session.quorum import Quorum, Timeouts, states_before
from pcomm.ntp.session.records import Decision, Join, Records, headline, store_lost
from pcomm.ntp.session.resume_point import RankState
from pcomm.ntp.session.spares import Spares

__all__ = ["Membership"]


_PAUSE_S = 0.02


class Membership:
    """This process as a member of a job: its generation, and how it comes to the next one.

    Args:
        connect: Function that makes a new connection to the store.
        rank: Global rank of this process; of a spare, a number that is none of `places`.
        ranks: Ranks of generation 0.
        places: Ranks that the job may ever have, each with the number of its replica.
        facts: Facts that must be the same on all ranks.
        timeouts: Time limits.
        incarnation: Number of processes that had the rank before.
        host: Host of this process, which it tells the others; None where each replica is one.
        is_spare: True for a process that waits for any place, however long.
        are_enough: Function that tells whether these ranks can begin the job again from its
            checkpoint when no other one is left; None where there is no checkpoint.

    Attributes:
        rank: Global rank of this process; of a spare, that whose place it has got.
        records: Records of the session, on a connection of the calling thread.
        number: Number of the generation.
        ranks: Its ranks, ascending.
        speeds: Relative speeds other than 1, by rank.
        gone: Ranks that are gone since the last generation that was complete, with the reason.
        is_over: True once all steps are done on all ranks.
        stops: True once it was decided that the job ends after a step.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        ranks: Sequence[int],
        places: Mapping[int, int],
        facts: Mapping[str, str],
        timeouts: Timeouts,
        incarnation: int = 0,
        *,
        host: str | None = None,
        is_spare: bool = False,
        are_enough: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        self._incarnation, self._is_spare = incarnation, is_spare
        self._connect, self.rank, self._places = connect, rank, dict(places)
        self._host = host
        self._spares, self._are_enough = Spares(places), are_enough
        self._facts, self._timeouts = dict(facts), timeouts
        self.records = Records(connect())
        self._exits = ExitReports(self.records.store)
        self._token = uuid.uuid4().hex
        self.number, self.ranks = 0, tuple(sorted(ranks))
        self.incarnations: Mapping[int, int] = {}
        self.processes: Mapping[int, int] = {}
        self.speeds: Mapping[int, float] = {}
        self.gone: dict[int, str] = {}
        self._is_member = False
        self._newest: frozenset[int] = frozenset()
        self.is_over, self.stops = False, False
        self._joins_done = 0
        self.watch = Watch(
            connect, rank, heartbeat_s=timeouts.heartbeat_s, dead_after_s=timeouts.dead_after_s
        )

    # -- entering ----------------------------------------------------------------------------

    def enter(self) -> dict[int, RankState]:
        """Take the place in generation 0, or wait until a later one has this process.

        Returns:
            The states of the ranks that took this process in; none in generation 0.

        Raises:
            ConfigError: The members refuse this process.
            PeerError: It cannot connect to one of them.
            PeerTimeoutError: No generation with this process began in time.
            ClosedError: The job is over.
        """
        self._exits.read()
        had_another = self._exits.of(self.rank, {}) is not None
        is_first = not had_another and self.rank in self.ranks
        if is_first and self.records.claim_first(self.rank, self._token):
            self._is_member = True
            self._begin()
            return {}
        end_s = math.inf if self._is_spare else time.monotonic() + self._timeouts.join_s
        self._reach_members(end_s)
        decision = self._join(end_s)
        states = states_before(self.records, self.number, decision, self.check_fence)
        self._go_over(decision)
        return states

    def _reach_members(self, end_s: float) -> None:
        """Connect to each rank of the newest generation, before these wait for this process.

        One that has died is waited for: the others leave it behind.
        """
        beats: dict[int, str] = {}
        ranks = self.ranks
        while time.monotonic() < end_s and not self._ended(ranks):
            while (decision := self.records.decision(self.number)) is not None:
                if decision.is_end:
                    return
                self._follow(decision)
                ranks, beats = decision.ranks, {}
            others = [rank for rank in ranks if rank != self.rank]
            for rank in others:
                beats.setdefault(rank, self.records.beat_of(self.number, rank))
            addresses = self.records.reach(self.number, others)
            found = unreachable(addresses, self._timeouts.dead_after_s)
            if not found and len(addresses) == len(others):
                return
            alive = {
                f"rank {rank} at {reason}"
                for rank, reason in found.items()
                if self.records.beat_of(self.number, rank) != beats[rank]
            }
            if alive and self.records.decision(self.number) is None:
                raise PeerError(
                    f"Session: rank {self.rank} joins",
                    found=f"no connection from {self.watch.reach.address} to "
                    + "; ".join(sorted(alive)),
                    why="Each rank connects to each other one, and all would wait for this one.",
                    fix="Let packets pass between these hosts; GLOO_SOCKET_IFNAME names the "
                    "interface where the name of a host stands for another one. The others go on.",
                )
            time.sleep(_PAUSE_S)

    def _join(self, end_s: float) -> Decision:
        # A process that no launcher started comes after all whose ends were told.
        incarnation = max(self._incarnation, self._exits.next_incarnation(self.rank))
        join = Join(self.rank, self._token, incarnation, self._facts, self._is_spare)
        self.records.ask_to_join(join)
        while True:
            self._begin_again()
            decision = self.records.decision(self.number)
            if decision is not None and decision.is_end:
                raise ClosedError(
                    f"Session: rank {self.rank} joins",
                    found="a job whose last step is done",
                    why="Its ranks have ended, or are about to.",
                    fix="Start a new job from its checkpoint if there is more to do.",
                )
            if decision is not None and self._token in decision.newcomers.values():
                places = {token: rank for rank, token in decision.newcomers.items()}
                self.rank = self.watch.rank = places[self._token]
                return decision
            if (reason := self.records.refused(self._token)) is not None:
                raise ConfigError(
                    f"Session: rank {self.rank} joins",
                    found=reason,
                    why="All ranks of a job run the same software with the same settings.",
                    fix="Start the process again with those of the job; the others go on.",
                )
            if decision is not None:
                self._follow(decision)
                continue
            if time.monotonic() > end_s or self.watch.lost is not None:
                self.check_store()
                raise PeerTimeoutError(
                    f"Session: rank {self.rank} joins",
                    found=f"generation {self.number} without it, {self._timeouts.join_s:g} s long",
                    why="Ranks are taken in at the end of a step, or when another one has died.",
                    fix="Raise join_s above the length of a step, or look whether the job stands "
                    "still.",
                )
            time.sleep(_PAUSE_S)

    def _follow(self, decision: Decision) -> None:
        """Go to a generation that this process has no part in, to wait there."""
        self.number += 1
        self.ranks, self.incarnations = decision.ranks, decision.incarnations
        self.processes = decision.processes

    def _ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """How each of the ranks of the generation has ended; empty if one of them may live."""
        self._exits.read()
        found = {r: self._exits.of(r, self.incarnations, self.processes) for r in ranks}
        told = {rank: reason for rank, reason in found.items() if reason is not None}
        return told if len(told) == len(ranks) else {}

    def _begin_again(self) -> None:
        """Begin the job again with those that wait, if no rank of it is left. Local.

        Raises:
            PeerError: The last ranks have ended by errors of their own, which would come again;
                or the spares, or anybody without a checkpoint, cannot begin it.
        """
        gone = self._ended(self.ranks)
        if not gone or self.records.decision(self.number) is not None:
            return
        proposal = self._propose((), gone)
        has_failed = any(reason.startswith("failed") for reason in gone.values())
        is_possible = self._are_enough is not None and self._are_enough(proposal.ranks)
        if is_possible and not has_failed:
            self.records.decide(self.number, proposal)
        elif has_failed or self._is_spare or self._are_enough is None:
            raise PeerError(
                f"Session: rank {self.rank} joins",
                found="; ".join(f"rank {rank}: {reason}" for rank, reason in gone.items()),
                why="No rank is left. "
                + (
                    "An error of the program would come again."
                    if has_failed
                    else "Without a checkpoint, or with too few spares, none can begin again."
                ),
                fix="Start the job again from its last checkpoint.",
            )

    # -- leaving -----------------------------------------------------------------------------

    def form_quorum(self, reason: str, state: RankState) -> tuple[Decision, dict[int, RankState]]:
        """Leave the generation, form a quorum of those that live, and enter the next. Collective.

        Args:
            reason: Reason for the others to leave; the first one that is written stays.
            state: State of this rank.

        Returns:
            What was decided, and the states of those ranks of the next generation that were there.

        Raises:
            DivergenceError: A rank has ended since ranks differ.
            FencedError: The others have gone on without this rank.
        """
        self._check_diverged()
        decision = self.records.decision(self.number)
        if decision is None:
            self.records.raise_flag(self.number, reason)
            quorum = Quorum(
                self.records,
                self._exits,
                self.number,
                self.ranks,
                self.incarnations,
                self._timeouts,
                self.processes,
            )
            decision = quorum.attend(self.rank, state, self._propose, self.check_store)
            # It is told before its rank is gone, so that none goes on without it.
            self._check_diverged()
        self.gone |= decision.gone
        states = {}
        if not decision.is_end:
            states = states_before(self.records, self.number, decision, self.check_fence)
        self._go_over(decision)
        return decision, states

    def finish(self, applied: int) -> bool:
        """Wait until all ranks have come here, with no step left. Collective.

        Args:
            applied: Number of steps that are applied.

        Returns:
            False where the generation ends before that, since a rank is gone.

        Raises:
            PeerTimeoutError: Ranks did not come in time; names them.
        """
        self.records.say_done(self.number, self.rank, applied)
        missing, end_s = list(self.ranks), time.monotonic() + self._timeouts.join_s
        while (decision := self.records.decision(self.number)) is None:
            if self.watch.failure() is not None:
                return False
            missing = self.records.not_done(self.number, missing)
            if not missing:
                # Ranks that see this at once write the same.
                self.records.decide(self.number, Decision(()))
            elif time.monotonic() > end_s:
                raise PeerTimeoutError(
                    "Session: the end of the job",
                    found=f"ranks {missing} did not come within {self._timeouts.join_s:g} s",
                    why="A rank that is through stays until all are, to help if one dies.",
                    fix="Give the same number of steps on all ranks, or raise join_s.",
                )
            else:
                time.sleep(_PAUSE_S / 4)
        self.is_over = decision.is_end
        return self.is_over

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank leaves them for good, or joins no more. Local.

        They go on without it, but for a `DivergenceError`, with which all of them end.
        """
        reason = f"{type(error).__name__}: {headline(error)}"
        if not self._is_member:
            # Else they would take in a process that has ended, and wait for it.
            self.records.refuse(self._token, f"it waits no more: {reason}")
            return
        if isinstance(error, DivergenceError):
            self.records.say_diverged(self.number, error)
        self.records.say_left(self.number, self.rank, reason)
        self.records.raise_flag(self.number, f"rank {self.rank} has left: {reason}")

    def check_fence(self) -> None:
        """Raise `FencedError` if the others have gone on without this rank. Local.

        A rank also finds out when what it said, or the plan, of its generation is forgotten, and
        where it takes part in a control operation of the next one.
        """
        number = self.number
        while (decision := self.records.decision(number)) is not None and not decision.is_end:
            if not self._is_in(decision):
                raise self._fenced(decision, number)
            number += 1

    def try_connections(self) -> None:
        """Try whether this rank reaches the others, and tell those that it does not. Local."""
        others = [rank for rank in self.ranks if rank != self.rank]
        found = unreachable(self.records.reach(self.number, others), self._timeouts.dead_after_s)
        self.records.say_unreached(self.number, self.rank, found)

    def note_complete(self) -> None:
        """Note that the generation is complete on all ranks. Local."""
        self.gone.clear()
        self._newest = frozenset()
        if self.rank == self.ranks[0]:
            self.records.forget(self.number)

    def check_store(self) -> None:
        """Raise if the store is lost. Local."""
        if self.watch.lost is not None:
            raise store_lost(self.watch.lost)

    def control(self) -> Control:
        """A control of this generation, on a connection of its own, that a failure interrupts."""
        return WatchedControl(
            self._connect(),
            self.ranks,
            self.rank,
            self.watch.check,
            job=self.records.job(),
            generation=self.number,
            timeout_s=self._timeouts.agree_s,
        )

    def close(self) -> None:
        """End the thread. Local."""
        self.watch.close()

    def hosts(self) -> dict[int, str]:
        """The host of each rank of the generation, once all have entered it. Local.

        Raises:
            FencedError: They are forgotten, since the others have gone on.
        """
        found = self.records.hosts(self.number, self.ranks)
        if len(found) < len(self.ranks):
            self.check_fence()
        return found

    # -- newcomers ---------------------------------------------------------------------------

    def wants_in(self) -> bool:
        """Whether a process waits that can be taken in; refuses those that cannot. Local.

        The lowest rank asks, for all.
        """
        is_new = self.rank == self.ranks[0] and self.records.num_joins() > self._joins_done
        if self.rank != self.ranks[0] or not (is_new or self._spares.could_fill(self.ranks)):
            return False
        self._exits.read()
        return bool(self._newcomers(self.ranks))

    def _newcomers(self, ranks: Sequence[int]) -> dict[int, Join]:
        """Processes that can be taken in beside `ranks`, by rank."""
        found: dict[int, Join] = {}
        is_answered = True
        for number, join in self.records.joins(self._joins_done, self.records.num_joins()):
            if self._is_answered(join):
                if is_answered:
                    self._joins_done = number
                continue
            if join.is_spare:
                self._spares.wait(number, join)
                if is_answered:
                    self._joins_done = number
                continue
            is_answered = False
            if join.rank not in ranks:
                found[join.rank] = join
        return found | self._spares.fill({*ranks, *found}, self._is_answered)

    def _is_answered(self, join: Join) -> bool:
        """Whether a request needs no decision any more; answers what is refused."""
        if self.records.is_answered(join.token):
            return True
        if self._exits.of(join.rank, {join.rank: join.incarnation}) is not None:
            return True
        problem = self._problem(join)
        if problem:
            self.records.refuse(join.token, problem)
        return bool(problem)

    def _problem(self, join: Join) -> str:
        if join.rank not in self._places and not join.is_spare:
            return f"rank {join.rank}, which the topology of the job does not have"
        for name in sorted({*self._facts, *join.facts}):
            own, other = self._facts.get(name, "(nothing)"), join.facts.get(name, "(nothing)")
            if own != other:
                return f"{name} is {other} here and {own} in the job"
        return ""

    # -- how it is done ----------------------------------------------------------------------

    def _propose(self, there: Sequence[int], gone: Mapping[int, str]) -> Decision:
        out = left_out(self.records.unreached(self.number, there), there, self._newest)
        newest = self._newest.intersection(there)
        if newest and not out and not gone and not self._is_complete(there):
            # Whatever the reason is, the others had come this far without them.
            reason = "no generation with it was complete"
            out = dict.fromkeys(newest, reason)
        living, gone = [rank for rank in there if rank not in out], {**gone, **out}
        new = self._newcomers(living)
        ranks = tuple(sorted({*living, *new}))
        incarnations = {r: n for r, n in self.incarnations.items() if r in living}
        incarnations |= {r: join.incarnation for r, join in new.items()}
        processes = {r: n for r, n in self.processes.items() if r in living}
        processes |= {r: join.rank for r, join in new.items() if join.is_spare}
        speeds = {r: s for r, s in self.records.speeds(ranks).items() if s != 1}
        tokens = {r: join.token for r, join in new.items()}
        stops = self.records.stops()
        return Decision(ranks, tokens, incarnations, speeds, processes, stops, gone)

    def _check_diverged(self) -> None:
        if (error := self.records.diverged(self.number)) is not None:
            raise error

    def _is_complete(self, there: Sequence[int]) -> bool:
        """Whether one of `there` knows that all have the state of the generation."""
        said = self.records.said(self.number, there)
        return any(own.confirmed == self.number for own in said.values())

    def _go_over(self, decision: Decision) -> None:
        if decision.is_end:
            self.is_over = True
            return
        if not self._is_in(decision):
            raise self._fenced(decision, self.number)
        for token in decision.newcomers.values():
            # A request that was granted once is not granted again.
            self.records.mark_taken(token)
        self._is_member, self.stops = True, decision.stops
        self.number += 1
        self.ranks, self.speeds = decision.ranks, decision.speeds
        self.incarnations, self.processes = decision.incarnations, decision.processes
        self._newest = self._newest.union(decision.newcomers).intersection(self.ranks)
        self._begin()

    def _is_in(self, decision: Decision) -> bool:
        """Whether a decision has this process, and not another one in its place."""
        is_own = decision.newcomers.get(self.rank, self._token) == self._token
        return is_own and self.rank in decision.ranks

    def _begin(self) -> None:
        self.records.say_reach(self.number, self.rank, self.watch.reach.address)
        host = self._host or f"replica {self._places[self.rank]}"
        self.records.say_host(self.number, self.rank, host)
        self.watch.enter(self.number, self.ranks, self.incarnations, self.processes)

    def _fenced(self, decision: Decision, number: int) -> FencedError:
        reason = decision.gone.get(self.rank)
        return FencedError(
            f"Session: rank {self.rank} in generation {self.number}",
            found=f"generation {number + 1} has begun, of ranks {list(decision.ranks)}"
            + (f", without this one: {reason}" if reason else ""),
            why="The others took this process for dead: it was silent, did not leave its work in "
            "time, or is not connected with one of them. Nothing that it has or writes counts any "
            "more.",
            fix="End this process; a new one of the same rank joins again.",
        )


class WatchedControl(Control):
    """A `Control` that raises in the middle of an agreement once a check does.

    Args:
        store: Store that all ranks share.
        ranks: Ranks that agree.
        rank: Rank of this process.
        check: Function called while waiting; raises when the ranks leave the generation.
        job: Word that no other job has whose ranks live in this process. Torch names communicators
            for the whole process, and their names begin with it.
        generation: Number of changes of membership so far.
        timeout_s: Seconds to wait for the others.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        check: Callable[[], None],
        *,
        job: str,
        generation: int,
        timeout_s: float,
    ) -> None:
        self._check_failure, self._job = check, job
        super().__init__(store, ranks, rank, generation=generation, timeout_s=timeout_s)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of these ranks in this generation; the same on all of them."""
        return f"{super().prefix}/{self._job}"

    def check_fence(self) -> None:
        """Raise if a newer generation has begun, or the ranks leave this one. Local."""
        super().check_fence()
        self._check_failure()
