"""Ranks of a training job that are killed one after another, and what each kill held up.

Kills fall at random moments of a step. Once the others have committed a step without the killed
rank, a new process takes its place, and the next rank is killed when the job is whole again. The
arithmetic on attempts serves pcomm and what it is compared with, so that both mean the same by
"recovered": every process that is left has committed a step in which the killed one had no part.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from json import dumps, loads
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from core_bench.rows import Row, row
from ntp_bench.small_model import ROWS, WIDTH, StackModel, rows_of_replica, stack_units
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.process import RankPlace, ResilientRanks
from pcomm.core.topology import Topology
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.session import Session, TrainState


@dataclass(frozen=True)
class TimedAttempt:
    """One attempt at a step, by one process.

    Args:
        time_s: End of the attempt in seconds on the monotonic clock, which all processes share.
        step: Number of the step.
        is_committed: True where parameters took the step.
        members: Number of members of the job that took part.
    """

    time_s: float
    step: int
    is_committed: bool
    members: int

    def line(self) -> str:
        """The attempt as `read_attempts` reads it."""
        return f"{self.time_s} {self.step} {int(self.is_committed)} {self.members}"


def read_attempts(path: Path) -> list[TimedAttempt]:
    """The attempts in a file of one line each.

    Args:
        path: File that a process appends to; a last line without its end is left out.

    Returns:
        The attempts in the order of the lines; none where the file does not exist yet.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 4:
            time_s, step, is_committed, members = words
            found.append(TimedAttempt(float(time_s), int(step), is_committed == "1", int(members)))
    return found


def is_whole(attempts: Iterable[Sequence[TimedAttempt]], *, members: int, commits: int) -> bool:
    """Whether the last attempts of every process were committed by the whole job.

    Args:
        attempts: Attempts of each process, in order.
        members: Number of members of the whole job.
        commits: Number of attempts of a process that are looked at; fewer are not enough.
    """
    return all(
        len(own) >= commits and all(a.is_committed and a.members == members for a in own[-commits:])
        for own in attempts
    )


def first_commit_s(attempts: Sequence[TimedAttempt], after_s: float, members: int) -> float:
    """End of the first attempt after a moment that so many members committed; else infinity."""
    return next(
        (
            one.time_s
            for one in attempts
            if one.time_s > after_s and one.is_committed and one.members == members
        ),
        math.inf,
    )


@dataclass(frozen=True)
class RecoveryCost:
    """What one kill cost.

    Args:
        seconds: Time from the kill to the first step that was committed without the killed process,
            on the slowest of the others.
        repeated: Number of attempts after the kill that ended without a commit, over the others:
            each is a batch of one process that was drawn and not trained on, unless the job
            repeats it.
    """

    seconds: float
    repeated: int


def recovery_of(
    attempts: Mapping[int, Sequence[TimedAttempt]],
    *,
    killed_at_s: float,
    victims: Collection[int],
    members: int,
) -> RecoveryCost | None:
    """The recovery after a kill, or None where it has not happened yet.

    Args:
        attempts: Attempts by number of the process, in order.
        killed_at_s: Time of the kill in seconds on the monotonic clock.
        victims: Numbers of the killed processes.
        members: Number of members of the job after the kill, as attempts count them.

    Raises:
        ConfigError: No other process has attempts.
    """
    others = [found for process, found in attempts.items() if process not in victims]
    if not others:
        raise ConfigError(
            f"the recovery after the end of processes {sorted(victims)}",
            found="no other process",
            why="Time is taken on those that train on.",
            fix="Use two or more.",
        )
    ends = [first_commit_s(found, killed_at_s, members) for found in others]
    if max(ends) == math.inf:
        return None
    repeated = sum(
        killed_at_s < attempt.time_s < end and not attempt.is_committed
        for found, end in zip(others, ends, strict=True)
        for attempt in found
    )
    return RecoveryCost(max(ends) - killed_at_s, repeated)


@dataclass(frozen=True)
class RecoveryParts:
    """How one rank spent the time from a kill to its next committed step, in seconds.

    Args:
        detect_s: Time until the rank left the operation that it was in.
        agree_s: Time until it was decided who goes on.
        open_s: Time until the new groups were open.
        build_s: Time until the model was built.
        reshard_s: Time until the state had arrived on all ranks.
        step_s: Time of the attempt that was committed.
    """

    detect_s: float
    agree_s: float
    open_s: float
    build_s: float
    reshard_s: float
    step_s: float


@dataclass(frozen=True)
class GenerationChange:
    """One change of generation on a rank: its end on the monotonic clock, and seconds by part."""

    ended_s: float
    meet_s: float
    open_s: float
    build_s: float
    move_s: float


def parts_of(
    attempts: Sequence[TimedAttempt],
    left: Sequence[GenerationChange],
    *,
    killed_at_s: float,
    members: int,
) -> RecoveryParts | None:
    """The parts of one rank's time; None where it changed no generation after the kill."""
    committed_s = first_commit_s(attempts, killed_at_s, members)
    changes = [one for one in left if killed_at_s < one.ended_s <= committed_s]
    if not changes:
        return None
    change = changes[-1]
    inside = change.meet_s + change.open_s + change.build_s + change.move_s
    return RecoveryParts(
        change.ended_s - inside - killed_at_s,
        change.meet_s,
        change.open_s,
        change.build_s,
        change.move_s,
        committed_s - change.ended_s,
    )


def steps_missing(attempts: Sequence[TimedAttempt]) -> int:
    """Steps that a rank left out, or counted twice, by the numbers of its attempts."""
    missing = 0
    for one, other in pairwise(attempts):
        # A step that was ready may be applied during the recovery, which the next attempt shows.
        fine = (0, 1) if not other.is_committed else (1,)
        missing += other.step - one.step not in fine
    return missing


_T = TypeVar("_T")
_PATIENCE_S = 120.0
_BEFORE, _FOREVER = 5, 10**9


@dataclass(frozen=True)
class Kill:
    """One kill.

    Args:
        recovery: Its cost.
        parts: How the rank that was last to commit spent the time; None where it had left the
            step before the kill.
        missing: Number of steps that a rank never applied, or applied twice.
        excluded: Number of ranks that were alive and taken for dead during the recovery.
    """

    recovery: RecoveryCost
    parts: RecoveryParts | None
    missing: int
    excluded: int = 0


@dataclass(frozen=True)
class Signs:
    """What tells that a rank has died; errors of its peers alone exclude no rank.

    Args:
        words: Name of the setting.
        heartbeat_s: Seconds between two heartbeats of a rank.
        dead_after_s: Seconds without a heartbeat after which a rank is excluded.
        is_told: True where the launcher, which sees its processes end, tells the ranks.
    """

    words: str
    heartbeat_s: float = 0.5
    dead_after_s: float = 10.0
    is_told: bool = True


_TOLD = Signs("told by the launcher")
_HEARD = Signs("by heartbeats alone, dead after 0.5 s", 0.05, 0.5, is_told=False)
SETTINGS = ((4, _TOLD), (2, _TOLD), (2, _HEARD))
"""Tensor-parallel degree and evidence of jobs whose ranks are killed one after another."""

REPLICA_SETTINGS = ((2, _TOLD), (2, _HEARD))
"""The same of jobs of which all ranks of a replica are killed at once."""


class KilledJob:
    """The ranks of a job of two replicas, and what they have written down.

    Args:
        ranks: Ranks that are not started yet.
        tp: Tensor-parallel degree of the whole job.
        signs: Evidence of a death that the ranks have.
        folder: Empty folder for what they write.
        task: Function that the ranks call, with `first` and then the arguments of `train`.
        first: Its first arguments after the place.
    """

    def __init__(
        self,
        ranks: ResilientRanks,
        tp: int,
        signs: Signs,
        folder: Path,
        task: Callable[..., None] | None = None,
        first: tuple[object, ...] = (),
    ) -> None:
        self.size, self.tp = ranks.size, tp
        self._ranks, self._signs, self._folder, self._first = ranks, signs, folder, first
        self._starts = dict.fromkeys(range(ranks.size), 0)
        self._store = ranks.place(0).store()
        # Number of ended processes that were looked at, and of those that were alive but excluded.
        self._seen = self._excluded = 0
        self._gone: Collection[int] = ()
        ranks.start(task or train, self._args(0))

    def attempts(self) -> dict[int, list[TimedAttempt]]:
        """Attempts of the present process of each rank."""
        return {rank: read_attempts(self._path(rank)) for rank in self._starts}

    def wait_for_all(self) -> None:
        """Wait until the last steps of all ranks were committed by the whole job."""
        self._wait_for(
            lambda: is_whole(self.attempts().values(), members=self.size, commits=_BEFORE) or None,
            "the whole job",
        )

    def take_away(self, victims: Collection[int]) -> None:
        """Have ranks die, or whatever else makes them go. Local."""
        for victim in victims:
            self._ranks.kill(victim, signal.SIGKILL)

    def make_way(self, victims: Collection[int]) -> None:
        """See to it that the processes of ranks that are gone end."""

    def lose(self, victims: Collection[int]) -> Kill:
        """Lose ranks, wait until the others have committed a step, and let them join again."""
        self._gone, excluded = victims, self._excluded
        members, killed_at_s = self.size - len(victims), time.monotonic()
        self.take_away(victims)
        recovery = self._wait_for(
            lambda: recovery_of(
                self.attempts(), killed_at_s=killed_at_s, victims=victims, members=members
            ),
            "a step without those that are gone",
        )
        others = {rank: own for rank, own in self.attempts().items() if rank not in victims}
        slowest = max(others, key=lambda rank: first_commit_s(others[rank], killed_at_s, members))
        left = _read_left(self._path(slowest))
        parts = parts_of(others[slowest], left, killed_at_s=killed_at_s, members=members)
        missing = sum(map(steps_missing, others.values()))
        self.make_way(victims)
        self._ranks.wait(list(victims), timeout_s=_PATIENCE_S)
        self._gone = ()
        for victim in victims:
            self._join_again(victim)
        return Kill(recovery, parts, missing, self._excluded - excluded)

    def _wait_for(self, answer: Callable[[], _T | None], what: str) -> _T:
        """Wait for an answer, and let ranks join again that were alive and taken for dead."""
        end_s = time.monotonic() + _PATIENCE_S
        while (found := answer()) is None:
            while self._seen < self._store.add("pcomm/ended/count", 0):
                self._seen += 1
                words = self._store.get(f"pcomm/ended/{self._seen}").decode()
                rank, start = map(int, words.split()[:2])
                if start < self._starts[rank] or rank in self._gone:
                    # Another process has its place, or gets it in `lose`.
                    continue
                if "FencedError" not in words:
                    raise _no_sign(what, words)
                self._excluded += 1
                self._join_again(rank)
            if time.monotonic() > end_s:
                raise _no_sign(what, "none that should not")
            time.sleep(0.02)
        return found

    def _join_again(self, rank: int) -> None:
        self._starts[rank] += 1
        self._ranks.join_again(rank, self._args(self._starts[rank]))

    def _args(self, start: int) -> tuple[object, ...]:
        return *self._first, self.tp, str(self._folder), start, self._signs

    def _path(self, rank: int) -> Path:
        return _path(self._folder, rank, self._starts[rank])


def kill_ranks(
    tp: int,
    kills: int,
    signs: Signs,
    *,
    is_replica: bool = False,
    tell: Callable[[Kill], None] = lambda _: None,
) -> list[Kill]:
    """Kill ranks of a job of two replicas. Starts processes of its own.

    Args:
        tp: Tensor-parallel degree of the whole job.
        kills: Number of kills.
        signs: Evidence of a death that the ranks have.
        is_replica: True to kill all ranks of a replica each time.
        tell: Function that is called with each result.

    Raises:
        UnsupportedError: The job did not go on in time.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        ResilientRanks(2 * tp, preload=[__name__], imports_main=False) as ranks,
    ):
        job = KilledJob(ranks, tp, signs, Path(folder))
        return lose_ranks(job, kills, is_replica=is_replica, tell=tell)


def lose_ranks(
    job: KilledJob, times: int, *, is_replica: bool, tell: Callable[[Kill], None]
) -> list[Kill]:
    """Lose a random rank, or a random replica, again and again, whenever the job is whole.

    Raises:
        UnsupportedError: The job did not go on in time.
    """
    chance, found = random.Random(0), []
    for _ in range(times):
        job.wait_for_all()
        # A random moment of one of the next steps.
        time.sleep(chance.uniform(0, 0.2))
        victim = chance.randrange(job.size)
        first = victim // job.tp * job.tp
        found.append(job.lose(range(first, first + job.tp) if is_replica else [victim]))
        tell(found[-1])
    return found


def _no_sign(what: str, ended: str) -> UnsupportedError:
    return UnsupportedError(
        "pcomm bench ntp --parts recovery",
        found=f"no sign of {what}; processes that ended: {ended}",
        why="Each kill is timed until the others have committed a step.",
        fix="Try it on a machine with less other work.",
    )


def _path(folder: Path, rank: int, start: int) -> Path:
    return folder / f"{rank}-{start}.txt"


def _read_left(path: Path) -> list[GenerationChange]:
    own = path.with_suffix(".left")
    return (
        [GenerationChange(**loads(line)) for line in own.read_text().splitlines()]
        if own.exists()
        else []
    )


def train(place: RankPlace, tp: int, folder: str, start: int, signs: Signs) -> None:
    """On a rank: train until the process is ended, and write a line for each attempt."""
    torch.manual_seed(0)
    rank = place.rank

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = StackModel(plan, groups["tp"].collectives, rank)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    path = _path(Path(folder), rank, start)
    topology = Topology({"dp": 2, "tp": tp})

    def quiet() -> dist.Store:
        # What the launcher writes has no prefix.
        return dist.PrefixStore("quiet", place.store())

    with (
        Session(
            place if signs.is_told else quiet,
            topology,
            stack_units(),
            build,
            rank=rank,
            heartbeat_s=signs.heartbeat_s,
            dead_after_s=signs.dead_after_s,
        ) as session,
        path.open("a", buffering=1) as lines,
        path.with_suffix(".left").open("a", buffering=1) as changes,
    ):
        seen = len(session.transitions)
        for attempt in session.attempts(until=_FOREVER):
            generation, is_done = session.generation, False
            with attempt as step:
                shares = session.plan.token_shares(ROWS)
                generator = torch.Generator().manual_seed(session.step)
                batch = torch.randn(ROWS, WIDTH, generator=generator)
                own = batch[rows_of_replica(shares, session.plan.place(rank).replica)]
                loss = session.model(own).square().mean()
                step.backward(loss, weight=len(own) / ROWS)
                step.commit()
                is_done = True
                members = len(session.ranks)
                lines.write(
                    TimedAttempt(time.monotonic(), session.step, True, members).line() + "\n"
                )
            now_s = time.monotonic()
            if not is_done:
                members = len(session.ranks)
                lines.write(TimedAttempt(now_s, session.step, False, members).line() + "\n")
            if session.generation != generation:
                for change in session.transitions[seen:][-1:]:
                    left = GenerationChange(
                        now_s, change.meet_s, change.open_s, change.build_s, change.move_s
                    )
                    changes.write(dumps(asdict(left)) + "\n")
                seen = len(session.transitions)


def kill_rows(found: Sequence[Kill], place: str, benchmark: str = "ntp recovery") -> list[Row]:
    """Seconds from the kill to the next committed step, their parts, and what was lost.

    Args:
        found: Kills, at least one.
        place: Words for the job and what tells of deaths.
        benchmark: Name of the rows; those of one name are replaced together.
    """

    def named(case: str, value: float, unit: str, number: int) -> Row:
        return row(benchmark, f"{case} @ {place}", value, unit, number)

    seconds = [kill.recovery.seconds for kill in found]
    number = len(found)
    rows = [
        named("median", statistics.median(seconds), "s to the next committed step", number),
        named("longest", max(seconds), "s to the next committed step", number),
    ]
    parts = [kill.parts for kill in found if kill.parts is not None]
    if parts:
        for field in fields(RecoveryParts):
            all_of = [1e3 * getattr(one, field.name) for one in parts]
            case = "open groups" if field.name == "open_s" else field.name.removesuffix("_s")
            value = statistics.median(all_of)
            rows.append(named(case, value, "ms of the slowest rank, median", len(parts)))
    lost = ROWS * sum(kill.missing for kill in found)
    rows.append(named("lost or trained on twice", float(lost), "samples of all kills", number))
    taken = float(sum(kill.excluded for kill in found))
    rows.append(named("alive and taken for dead", taken, "ranks in all recoveries", number))
    return rows
