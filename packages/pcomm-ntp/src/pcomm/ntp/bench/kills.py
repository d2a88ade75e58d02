"""Ranks of a training job that are killed one after another, and what each kill held up.

Kills fall at random moments of a step. Once the others have committed a step without the killed
rank, a new process takes its place, and the next rank is killed when the job is whole again.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from itertools import pairwise
from json import dumps, loads
from pathlib import Path

import torch
import torch.distributed as dist

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.groups import Groups
from pcomm.core.process.rank_place import RankPlace
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.topology import Topology
from pcomm.ntp.bench.attempts import Attempt, Recovery, read_attempts, recovery_of
from pcomm.ntp.bench.small_model import ROWS, WIDTH, StackModel, rows_of_replica, stack_units
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.session import Built, Session

__all__ = [
    "SETTINGS",
    "Kill",
    "Left",
    "Parts",
    "Signs",
    "kill_ranks",
    "parts_of",
    "steps_missing",
]

_PATIENCE_S = 120.0
_BEFORE, _FOREVER = 5, 10**9


@dataclass(frozen=True)
class Parts:
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
class Left:
    """One change of generation on a rank: its end on the monotonic clock, and seconds by part."""

    ended_s: float
    meet_s: float
    open_s: float
    build_s: float
    move_s: float


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
    size, chance, found = 2 * tp, random.Random(0), []
    with (
        tempfile.TemporaryDirectory() as name,
        ResilientRanks(size, preload=[__name__], imports_main=False) as ranks,
    ):
        folder = Path(name)
        starts = dict.fromkeys(range(size), 0)
        ranks.start(_train, (tp, name, 0, signs))

        def attempts() -> dict[int, list[Attempt]]:
            return {rank: read_attempts(_path(folder, rank, n)) for rank, n in starts.items()}

        store = ranks.place(0).store()
        seen, excluded = 0, 0

        def rejoin(rank: int) -> None:
            starts[rank] += 1
            ranks.join_again(rank, (tp, name, starts[rank], signs))

        def wait(is_done: Callable[[], bool], what: str, killed: Collection[int]) -> None:
            """Wait, and let ranks join again that were alive and taken for dead."""
            nonlocal seen, excluded
            end_s = time.monotonic() + _PATIENCE_S
            while not is_done():
                told: list[str] = []
                while seen < store.add("pcomm/ended/count", 0):
                    seen += 1
                    told.append(store.get(f"pcomm/ended/{seen}").decode())
                for words in told:
                    rank = int(words.split()[0])
                    if "FencedError" in words:
                        excluded += 1
                        rejoin(rank)
                    elif rank not in killed or "killed" not in words:
                        raise _no_sign(what, words)
                if time.monotonic() > end_s:
                    raise _no_sign(what, "none that should not")
                time.sleep(0.02)

        killed: set[int] = set()
        for _ in range(kills):
            wait(lambda: _is_whole(attempts(), size), "the whole job", killed)
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.randrange(size)
            killed, before = {victim}, excluded
            killed_at_s = time.monotonic()
            ranks.kill(victim, signal.SIGKILL)

            def recovery(victim: int = victim, at: float = killed_at_s) -> Recovery | None:
                return recovery_of(attempts(), killed_at_s=at, victim=victim, members=size - 1)

            wait(lambda: recovery() is not None, "a step without the killed rank", killed)
            last = recovery()
            assert last is not None
            others = {rank: own for rank, own in attempts().items() if rank != victim}
            slowest = max(
                others, key=lambda rank: _committed_s(others[rank], killed_at_s, size - 1)
            )
            left = _read_left(_path(folder, slowest, starts[slowest]))
            parts = parts_of(others[slowest], left, killed_at_s=killed_at_s, members=size - 1)
            missing = sum(map(steps_missing, others.values()))
            found.append(Kill(last, parts, missing, excluded - before))
            tell(found[-1])
            ranks.wait([victim])
            rejoin(victim)
    return found


def _no_sign(what: str, ended: str) -> UnsupportedError:
    return UnsupportedError(
        "pcomm bench ntp --parts recovery",
        found=f"no sign of {what}; processes that ended: {ended}",
        why="Each kill is timed until the others have committed a step.",
        fix="Try it on a machine with less other work.",
    )


def parts_of(
    attempts: list[Attempt], left: list[Left], *, killed_at_s: float, members: int
) -> Parts | None:
    """The parts of one rank's time; None where it changed no generation after the kill."""
    committed_s = _committed_s(attempts, killed_at_s, members)
    changes = [one for one in left if killed_at_s < one.ended_s <= committed_s]
    if not changes:
        return None
    change = changes[-1]
    inside = change.meet_s + change.open_s + change.build_s + change.move_s
    return Parts(
        change.ended_s - inside - killed_at_s,
        change.meet_s,
        change.open_s,
        change.build_s,
        change.move_s,
        committed_s - change.ended_s,
    )


def steps_missing(attempts: list[Attempt]) -> int:
    """Steps that a rank left out, or counted twice, by the numbers of its attempts."""
    missing = 0
    for one, other in pairwise(attempts):
        # A step that was ready may be applied during the recovery, which the next attempt shows.
        fine = (0, 1) if not other.is_committed else (1,)
        missing += other.step - one.step not in fine
    return missing


def _committed_s(attempts: list[Attempt], killed_at_s: float, members: int) -> float:
    return next(
        one.time_s
        for one in attempts
        if one.time_s > killed_at_s and one.is_committed and one.members == members
    )


def _is_whole(attempts: dict[int, list[Attempt]], size: int) -> bool:
    return all(
        len(own) >= _BEFORE and all(a.is_committed and a.members == size for a in own[-_BEFORE:])
        for own in attempts.values()
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
