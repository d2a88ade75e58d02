"""What the ranks of a session write into the store, and how it is spelled.

| key below `pcomm/session/` | written by | says |
|---|---|---|
| `job` | the first rank that asks | a word for the job |
| `first/RANK` | each process of a rank | which of them is in generation 0 |
| `flag/G` | the first rank that suspects | that the ranks of generation G form a quorum |
| `said/G/RANK` | each rank that leaves G | its state (`RankState`) |
| `decision/G` | the first that proposes | the ranks after G, or that all is done |
| `diverged/G` | the first rank that sees it | that ranks differ, so that all of them end |
| `left/G/RANK` | a rank whose program ends | that it is gone, and why |
| `silent/G/RANK` | its neighbour | that its heartbeat has stopped |
| `done/G/RANK` | each rank at the end | that it has no step left |
| `over/G` | the first of these | the rank, and how many steps it has applied |
| `reach/G/RANK` | each rank | the address at which others try to connect |
| `host/G/RANK` | each rank | the host that it is lost with |
| `unreached/G/RANK` | a rank after a failure | the ranks that it cannot connect to |
| `plan/G`, `scalars/G/STAGE` | a rank with the state | what a newcomer in G needs beside tensors |
| `beat/G/RANK` | each rank's thread | heartbeats |
| `joins`, `join/N` | newcomers | requests to join, numbered |
| `refused/TOKEN`, `taken/TOKEN` | members | what became of a request |
| `speed/RANK`, `stop` | any rank | relative speed of a rank; that the job shall end |

Keys of a generation are written by its ranks alone, and decisions by compare-and-set. So what a
rank writes that was left behind reaches no rank of a later generation. Once a later one is complete
they are deleted, but for decision and flag, which a process looks for that slept meanwhile.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from pcomm.core.errors import DivergenceError, PeerError
from pcomm.ntp.session.resume_point import RankState

__all__ = [
    "Decision",
    "Join",
    "Records",
    "StoreLostError",
    "headline",
    "store_errors",
    "store_lost",
]


# What ranks write of themselves, and below their control: agreements, and addresses of groups.
_OF_A_GENERATION = re.compile(
    "pcomm/(?:session/(?:said|diverged|left|silent|done|over|reach|host|unreached|plan|scalars|beat)/)?"
    r"(\d+)(?:/|$)"
)


@dataclass(frozen=True)
class Decision:
    """What follows a generation; the same for all of its ranks.

    Args:
        ranks: Ranks of the next generation, ascending; empty if all steps are done.
        newcomers: Tokens of the processes that are new in it, by rank.
        incarnations: Number of processes that had a rank before the one of now, by rank, where
            there were any; of a spare, those that had its own number.
        speeds: Relative speeds other than 1, by rank.
        processes: By rank, the number of the process that has its place, where that is a spare.
        stops: True if a rank has asked to end after the step.
        gone: Ranks of the generation before whose processes are gone, each with the reason.
    """

    ranks: tuple[int, ...]
    newcomers: Mapping[int, str] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    speeds: Mapping[int, float] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)
    stops: bool = False
    gone: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        """Whether all steps are done, and no generation follows."""
        return not self.ranks

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The decision that `to_json` wrote."""
        found = json.loads(text)
        by_rank = ("newcomers", "incarnations", "speeds", "processes", "gone")
        tables = {name: {int(r): v for r, v in found[name].items()} for name in by_rank}
        return cls(tuple(found["ranks"]), **tables, stops=found["stops"])


@dataclass(frozen=True)
class Join:
    """The request of a new process to take the place of a rank.

    Args:
        rank: Global rank whose place it takes; of a spare, its own number.
        token: Word that no other process has.
        incarnation: Number of processes that had the rank before.
        facts: Facts that must be the same on all ranks, such as versions.
        is_spare: True if it takes any place.
    """

    rank: int
    token: str
    incarnation: int
    facts: Mapping[str, str]
    is_spare: bool = False


class Records:
    """Typed access to the store of a session. Local; nothing here waits for another rank.

    Args:
        store: A connection of its own: calls on one connection wait for each other.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    # -- who is there ------------------------------------------------------------------------

    def claim_first(self, rank: int, token: str) -> bool:
        """Whether this process is the one that has the place of `rank` in generation 0."""
        return self._first(f"first/{rank}", token) == token

    def job(self) -> str:
        """A word for the job of this store, the same on all ranks; no other store has it."""
        return self._first("job", uuid.uuid4().hex[:12])

    def beat(self, generation: int, rank: int, number: int) -> None:
        """Write a heartbeat; that of a process that is not of the generation is not read."""
        self._set(f"beat/{generation}/{rank}", str(number))

    def beat_of(self, generation: int, rank: int) -> str:
        """The last heartbeat of a rank in a generation; empty before the first."""
        return self._get(f"beat/{generation}/{rank}") or ""

    def say_left(self, generation: int, rank: int, reason: str) -> None:
        """Tell that the program of this rank has left the session."""
        self._set(f"left/{generation}/{rank}", reason)

    def say_diverged(self, generation: int, error: DivergenceError) -> None:
        """Tell that ranks of a generation differ, so that no quorum of them goes on."""
        parts = (error.asked, error.found, error.why, error.fix)
        self._first(f"diverged/{generation}", json.dumps(parts))

    def diverged(self, generation: int) -> DivergenceError | None:
        """The error with which ranks of a generation have ended, or None."""
        text = self._get(f"diverged/{generation}")
        if text is None:
            return None
        asked, found, why, fix = json.loads(text)
        return DivergenceError(asked, found=found, why=why, fix=fix)

    def left(self, generation: int, rank: int) -> str | None:
        """Why the program of a rank has left the session, or None."""
        return self._get(f"left/{generation}/{rank}")

    def say_silent(self, generation: int, rank: int, reason: str) -> None:
        """Tell that the heartbeat of a rank has stopped for too long."""
        self._first(f"silent/{generation}/{rank}", reason)

    def silent(self, generation: int, rank: int) -> str | None:
        """How long the heartbeat of a rank has stopped, as text, or None."""
        return self._get(f"silent/{generation}/{rank}")

    # -- leaving a generation ----------------------------------------------------------------

    def raise_flag(self, generation: int, message: str) -> None:
        """Have the ranks of a generation leave their operations and form a quorum."""
        self._first(f"flag/{generation}", message)

    def flag(self, generation: int) -> str | None:
        """Why the ranks of a generation leave it, or None."""
        return self._get(f"flag/{generation}")

    def say(self, generation: int, rank: int, state: RankState) -> None:
        """Write the state of this rank; it must not change before the decision."""
        self._set(f"said/{generation}/{rank}", json.dumps(asdict(state)))

    def said(self, generation: int, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states of those of `ranks` that have arrived."""
        texts = {rank: self._get(f"said/{generation}/{rank}") for rank in ranks}
        return {r: RankState(**json.loads(text)) for r, text in texts.items() if text is not None}

    def decide(self, generation: int, proposal: Decision) -> Decision:
        """The decision about a generation: `proposal`, or what another rank wrote first."""
        return Decision.from_json(self._first(f"decision/{generation}", proposal.to_json()))

    def decision(self, generation: int) -> Decision | None:
        """The decision about a generation, or None."""
        text = self._get(f"decision/{generation}")
        return None if text is None else Decision.from_json(text)

    def say_done(self, generation: int, rank: int, applied: int) -> None:
        """Tell that this rank has no step left after `applied` steps."""
        self._set(f"done/{generation}/{rank}", "1")
        self._first(f"over/{generation}", f"{rank} {applied}")

    def over(self, generation: int) -> tuple[int, int] | None:
        """The first rank without a step left, and the number of steps applied; or None."""
        text = self._get(f"over/{generation}")
        if text is None:
            return None
        rank, applied = map(int, text.split())
        return rank, applied

    def not_done(self, generation: int, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have not told that they have no step left."""
        return [rank for rank in ranks if self._get(f"done/{generation}/{rank}") is None]

    # -- who reaches whom --------------------------------------------------------------------

    def say_reach(self, generation: int, rank: int, address: str) -> None:
        """Write the address at which other ranks try to connect to this one."""
        self._set(f"reach/{generation}/{rank}", address)

    def reach(self, generation: int, ranks: Sequence[int]) -> dict[int, str]:
        """The addresses of those of `ranks` that have written one."""
        texts = {rank: self._get(f"reach/{generation}/{rank}") for rank in ranks}
        return {rank: text for rank, text in texts.items() if text is not None}

    def say_host(self, generation: int, rank: int, host: str) -> None:
        """Write the host of this rank."""
        self._set(f"host/{generation}/{rank}", host)

    def hosts(self, generation: int, ranks: Sequence[int]) -> dict[int, str]:
        """The hosts of those of `ranks` that have written theirs."""
        texts = {rank: self._get(f"host/{generation}/{rank}") for rank in ranks}
        return {rank: text for rank, text in texts.items() if text is not None}

    def say_unreached(self, generation: int, rank: int, found: Mapping[int, str]) -> None:
        """Write which ranks this one cannot connect to, each with the reason."""
        self._set(f"unreached/{generation}/{rank}", json.dumps(found))

    def unreached(self, generation: int, ranks: Sequence[int]) -> dict[int, dict[int, str]]:
        """What those of `ranks` wrote that have tried."""
        texts = {rank: self._get(f"unreached/{generation}/{rank}") for rank in ranks}
        return {
            rank: {int(other): reason for other, reason in json.loads(text).items()}
            for rank, text in texts.items()
            if text is not None
        }

    # -- what a newcomer needs ---------------------------------------------------------------

    def publish(self, name: str, text: str) -> None:
        """Write text under a name with the number of the generation."""
        self._set(name, text)

    def published(self, name: str) -> str | None:
        """The text under a name, or None."""
        return self._get(name)

    def ask_to_join(self, join: Join) -> None:
        """Ask the members to take this process in."""
        number = self.store.add("pcomm/session/joins", 1)
        self._set(f"join/{number}", json.dumps(asdict(join)))

    def num_joins(self) -> int:
        """Number of requests to join so far."""
        return int(self.store.add("pcomm/session/joins", 0))

    def joins(self, after: int, up_to: int) -> list[tuple[int, Join]]:
        """The requests with these numbers; one that is still being written ends the list."""
        found = []
        for number in range(after + 1, up_to + 1):
            text = self._get(f"join/{number}")
            if text is None:
                break
            found.append((number, Join(**json.loads(text))))
        return found

    def refuse(self, token: str, reason: str) -> None:
        """Tell a process that it is not taken in."""
        self._set(f"refused/{token}", reason)

    def refused(self, token: str) -> str | None:
        """Why a process is not taken in, or None."""
        return self._get(f"refused/{token}")

    def mark_taken(self, token: str) -> None:
        """Note that a process was taken in, so that its request is not granted again."""
        self._set(f"taken/{token}", "1")

    def is_answered(self, token: str) -> bool:
        """Whether a process was taken in or refused."""
        return self._get(f"taken/{token}") is not None or self.refused(token) is not None

    # -- speeds ------------------------------------------------------------------------------

    def set_speed(self, rank: int, speed: float) -> None:
        """Write the relative speed of a rank."""
        self._set(f"speed/{rank}", repr(float(speed)))

    def speeds(self, ranks: Sequence[int]) -> dict[int, float]:
        """The relative speeds of those of `ranks` for which one is written."""
        texts = {rank: self._get(f"speed/{rank}") for rank in ranks}
        return {rank: float(text) for rank, text in texts.items() if text is not None}

    def ask_to_stop(self) -> None:
        """Write that the job shall end after the step."""
        self._set("stop", "1")

    def stops(self) -> bool:
        """Whether the job shall end after the step."""
        return self._get("stop") is not None

    # -- what is read no more ----------------------------------------------------------------

    def forget(self, before: int) -> None:
        """Delete what ranks wrote in generations below `before`, all of which they have left."""
        try:
            keys = self.store.list_keys()
        except (AttributeError, NotImplementedError):  # an older torch, or a store of another kind
            return
        for key in keys:
            found = _OF_A_GENERATION.match(key)
            if found is not None and int(found[1]) < before:
                self.store.delete_key(key)

    # -- how it is done ----------------------------------------------------------------------

    def _set(self, key: str, text: str) -> None:
        # An empty value and a missing one would be the same to a compare-and-set.
        self.store.set(f"pcomm/session/{key}", text or " ")

    def _first(self, key: str, text: str) -> str:
        return self.store.compare_set(f"pcomm/session/{key}", "", text or " ").decode()

    def _get(self, key: str) -> str | None:
        name = f"pcomm/session/{key}"
        return self.store.get(name).decode() if self.store.check([name]) else None


def headline(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class StoreLostError(PeerError):
    """The store of a session does not answer any more, so that its ranks cannot agree."""


def store_lost(error: Exception) -> StoreLostError:
    """The error for a store that `error` came from."""
    found = StoreLostError(
        "Session: the store",
        found=headline(error),
        why="Ranks agree through the store, and the process that hosts it has ended or cannot be "
        "reached. Without it no rank can know who goes on.",
        fix="Start the job again from its last checkpoint; keep the store in a process that "
        "outlives the ranks.",
    )
    found.__cause__ = error
    return found


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise errors of the store that occur in the block as `StoreLostError`."""
    try:
        yield
    except dist.DistError as error:
        raise store_lost(error) from error
