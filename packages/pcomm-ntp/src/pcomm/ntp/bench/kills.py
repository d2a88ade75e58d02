"""Ranks of a training job that are killed one after another, and what each kill held up.

Kills fall at random moments of a step. Once the others have committed a step without the killed
rank, a new process takes its place, and the next rank is killed when the job is whole again.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.groups import Groups
from pcomm.core.process.rank_place import RankPlace
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.topology import Topology
from pcomm.ntp.bench.attempts import (
    Attempt,
    Recovery,
    first_commit_s,
    is_whole,
    read_attempts,
    recovery_of,
)
from pcomm.ntp.bench.recovery_parts import Left, Parts, parts_of, steps_missing
from pcomm.ntp.bench.small_model import ROWS, WIDTH, StackModel, rows_of_replica, stack_units
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.session import Built, Session

__all__ = ["SETTINGS", "Kill", "Signs", "kill_ranks"]

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

    recovery: Recovery
    parts: Parts | None
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


SETTINGS = (
    (4, Signs("told by the launcher")),
    (2, Signs("told by the launcher")),
    (2, Signs("by heartbeats alone, dead after 0.5 s", 0.05, 0.5, is_told=False)),
)
"""Tensor-parallel degree and evidence of the jobs whose ranks are killed."""


class _Job:
    """The ranks of a job of two replicas, and what they have written down.

    Args:
        ranks: Ranks that are not started yet.
        tp: Tensor-parallel degree of the whole job.
        signs: Evidence of a death that the ranks have.
        folder: Empty folder for what they write.
    """

    def __init__(self, ranks: ResilientRanks, tp: int, signs: Signs, folder: Path) -> None:
        self.size = ranks.size
        self._ranks, self._tp, self._signs, self._folder = ranks, tp, signs, folder
        self._starts = dict.fromkeys(range(ranks.size), 0)
        self._store = ranks.place(0).store()
        # Number of ended processes that were looked at, and of those that were alive but excluded.
        self._seen = self._excluded = 0
        self._killed: int | None = None
        ranks.start(_train, (tp, str(folder), 0, signs))

    def attempts(self) -> dict[int, list[Attempt]]:
        """Attempts of the present process of each rank."""
        return {rank: read_attempts(self._path(rank)) for rank in self._starts}

    def wait_for_all(self) -> None:
        """Wait until the last steps of all ranks were committed by the whole job."""
        self._wait_for(
            lambda: is_whole(self.attempts().values(), members=self.size, commits=_BEFORE) or None,
            "the whole job",
        )

    def kill(self, victim: int) -> Kill:
        """Kill a rank, wait until the others have committed a step, and let it join again."""
        self._killed, excluded = victim, self._excluded
        members, killed_at_s = self.size - 1, time.monotonic()
        self._ranks.kill(victim, signal.SIGKILL)
        recovery = self._wait_for(
            lambda: recovery_of(
                self.attempts(), killed_at_s=killed_at_s, victim=victim, members=members
            ),
            "a step without the killed rank",
        )
        others = {rank: own for rank, own in self.attempts().items() if rank != victim}
        slowest = max(others, key=lambda rank: first_commit_s(others[rank], killed_at_s, members))
        left = _read_left(self._path(slowest))
        parts = parts_of(others[slowest], left, killed_at_s=killed_at_s, members=members)
        missing = sum(map(steps_missing, others.values()))
        self._ranks.wait([victim])
        self._join_again(victim)
        return Kill(recovery, parts, missing, self._excluded - excluded)

    def _wait_for(self, answer: Callable[[], _T | None], what: str) -> _T:
        """Wait for an answer, and let ranks join again that were alive and taken for dead."""
        end_s = time.monotonic() + _PATIENCE_S
        while (found := answer()) is None:
            while self._seen < self._store.add("pcomm/ended/count", 0):
                self._seen += 1
                words = self._store.get(f"pcomm/ended/{self._seen}").decode()
                rank = int(words.split()[0])
                if "FencedError" in words:
                    self._excluded += 1
                    self._join_again(rank)
                elif rank != self._killed or "killed" not in words:
                    raise _no_sign(what, words)
            if time.monotonic() > end_s:
                raise _no_sign(what, "none that should not")
            time.sleep(0.02)
        return found

    def _join_again(self, rank: int) -> None:
        self._starts[rank] += 1
        args = self._tp, str(self._folder), self._starts[rank], self._signs
        self._ranks.join_again(rank, args)

    def _path(self, rank: int) -> Path:
        return _path(self._folder, rank, self._starts[rank])


def kill_ranks(
    tp: int, kills: int, signs: Signs, *, tell: Callable[[Kill], None] = lambda _: None
) -> list[Kill]:
    """Kill ranks of a job of two replicas. Starts processes of its own.

    Args:
        tp: Tensor-parallel degree of the whole job.
        kills: Number of kills.
        signs: Evidence of a death that the ranks have.
        tell: Function that is called with each result.

    Raises:
        UnsupportedError: The job did not go on in time.
    """
    chance, found = random.Random(0), []
    with (
        tempfile.TemporaryDirectory() as folder,
        ResilientRanks(2 * tp, preload=[__name__], imports_main=False) as ranks,
    ):
        job = _Job(ranks, tp, signs, Path(folder))
        for _ in range(kills):
            job.wait_for_all()
            # A random moment of one of the next steps.
            time.sleep(chance.uniform(0, 0.2))
            found.append(job.kill(chance.randrange(job.size)))
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


def _read_left(path: Path) -> list[Left]:
    own = path.with_suffix(".left")
    return [Left(**loads(line)) for line in own.read_text().splitlines()] if own.exists() else []


def _train(place: RankPlace, tp: int, folder: str, start: int, signs: Signs) -> None:
    """On a rank: train until the process is ended, and write a line for each attempt."""
    torch.manual_seed(0)
    rank = place.rank

    def build(plan: Plan, groups: Groups, rank: int) -> Built:
        model = StackModel(plan, groups["tp"].collectives, rank)
        return Built(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

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
                lines.write(Attempt(time.monotonic(), session.step, True, members).line() + "\n")
            now_s = time.monotonic()
            if not is_done:
                members = len(session.ranks)
                lines.write(Attempt(now_s, session.step, False, members).line() + "\n")
            if session.generation != generation:
                for change in session.transitions[seen:][-1:]:
                    left = Left(now_s, change.meet_s, change.open_s, change.build_s, change.move_s)
                    changes.write(dumps(asdict(left)) + "\n")
                seen = len(session.transitions)
