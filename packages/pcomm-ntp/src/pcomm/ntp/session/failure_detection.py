"""How a rank learns that others are gone: evidence, a thread that collects it, who is reached.

Certain is only what the launcher tells, that a process has ended, and what a process tells of
itself when its program leaves the session. Silence is no more than a suspicion that has become old.
An error of a connection does not tell which rank is at fault, so it excludes none; it is a
`SuspectedFailure`. The verdict is that of the ranks that form a quorum.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives import Collectives, InstrumentedCollectives, Pending
from pcomm.core.collectives.instrumented import interruptible
from pcomm.core.collectives.protocol import Call
from pcomm.core.errors import PcommError, PeerError
from pcomm.core.process.world import ipv4_of
from pcomm.ntp.session.records import Records, headline

__all__ = [
    "ExitReports",
    "HeartbeatTimeout",
    "Reach",
    "SuspectedFailure",
    "Watch",
    "left_out",
    "translate_comm_errors",
    "translating_errors",
    "unreachable",
]


# Between two looks at the flag; what else is read is read once in as many looks.
_LOOK_S, _LOOKS_PER_READ = 0.02, 5


class Watch:
    """A daemon thread with a connection to the store of its own.

    It writes this rank's heartbeat, reads those of the ranks behind it up to one that beats, and
    reads ends of processes and the flag of the generation. What it finds raises the flag, and
    `failure` tells.

    Args:
        connect: Function that makes a new connection to the store.
        rank: Global rank of this process.
        heartbeat_s: Seconds between two heartbeats.
        dead_after_s: Seconds without a heartbeat after which a neighbour is told to be silent.

    Attributes:
        rank: Global rank of this process; a spare gets one before it enters a generation.
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
        self._records, self.rank = Records(connect()), rank
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._exits = ExitReports(self._records.store)
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
        self,
        generation: int,
        ranks: tuple[int, ...],
        incarnations: Mapping[int, int],
        processes: Mapping[int, int] | None = None,
    ) -> None:
        """Watch the ranks of a generation from now on; see `ExitReports.of`. Local."""
        self.step = None
        # New heartbeats, too: a rank that came back may have the number at which it died.
        heartbeats = HeartbeatTimeout(2 * self._heartbeat_s)
        self._watched = _Watched(
            generation, ranks, heartbeats, dict(incarnations), dict(processes or {})
        )

    def failure(self) -> str | None:
        """Why the ranks of the generation leave it, or None. Local; reads nothing."""
        if self.lost is not None:
            return f"the store does not answer: {self.lost}"
        told, watched = self._told, self._watched
        if told and watched and told[0] == watched.generation:
            return told[1]
        return self.out_of_steps()

    def out_of_steps(self) -> str | None:
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
                    self._records.beat(watched.generation, self.rank, beats)
                    self._look_at_neighbours(watched, now_s)
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
            self._exits.read()
            for rank in watched.ranks:
                reason = self._exits.of(rank, watched.incarnations, watched.processes)
                if reason is not None:
                    message = f"rank {rank} has ended: {reason}"
                    self._records.raise_flag(watched.generation, message)
        message_of_flag = self._records.flag(watched.generation)
        if message_of_flag is not None:
            self._told = watched.generation, message_of_flag

    def _look_at_neighbours(self, watched: _Watched, now_s: float) -> None:
        """Raise the flag if the next rank is silent; `Quorum` finds others that died with it.

        Where its heartbeat is late the one behind it is looked at, too, and so on: ranks of a host
        are lost together, and their silence counts from then and not from the quorum on.
        """
        if self.rank not in watched.ranks:
            return
        own = watched.ranks.index(self.rank)
        for rank in (*watched.ranks[own + 1 :], *watched.ranks[:own]):
            beat = self._records.beat_of(watched.generation, rank)
            if not beat and watched.generation == 0:
                # Late to begin, not silent: the agreement to open the groups has a limit for that.
                return
            silent_s = watched.heartbeats.look(rank, beat, now_s)
            if silent_s >= self._dead_after_s:
                message = f"no heartbeat for {silent_s:.1f} s"
                self._records.say_silent(watched.generation, rank, message)
                self._records.raise_flag(watched.generation, f"rank {rank}: {message}")
            elif not silent_s:
                return


@dataclass(frozen=True)
class _Watched:
    """What is watched: a generation, its ranks, their heartbeats, and which process of each."""

    generation: int
    ranks: tuple[int, ...]
    heartbeats: HeartbeatTimeout
    incarnations: Mapping[int, int] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=dict)


# Written by the launcher: `pcomm.core.process.process_watch`.
_ENDED = "pcomm/ended"
"""Prefix of the keys in which the launcher tells ends of processes: `count`, and 1 to `count`."""


class ExitReports:
    """Exits of processes that the launcher has told, as far as they were read.

    Args:
        store: Store in which the launcher writes them.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        # Of each rank, the last process that has ended, and the reason.
        self._last: dict[int, tuple[int, str]] = {}
        self.num_read = 0

    def read(self) -> bool:
        """Read what is new; returns whether there was any."""
        before, count = self.num_read, int(self._store.add(f"{_ENDED}/count", 0))
        while self.num_read < count:
            key = f"{_ENDED}/{self.num_read + 1}"
            # The count comes first, and then the text.
            if not self._store.check([key]):
                break
            self.num_read += 1
            rank, incarnation, *reason = self._store.get(key).decode().split(" ", 2)
            if int(incarnation) >= self.next_incarnation(int(rank)):
                self._last[int(rank)] = int(incarnation), "".join(reason)
        return self.num_read > before

    def next_incarnation(self, rank: int) -> int:
        """Incarnation of the first process of `rank` that may live, as far as was told."""
        return self._last.get(rank, (-1, ""))[0] + 1

    def of(
        self,
        rank: int,
        incarnations: Mapping[int, int],
        processes: Mapping[int, int] | None = None,
    ) -> str | None:
        """Why the process of `rank` has ended, or None.

        The end of a process that another one has replaced says nothing of that one, also where it
        comes late, as that of a process which stood still.

        Args:
            rank: Global rank.
            incarnations: Number of processes that had a rank before the one of now, by rank; 0
                where it is absent.
            processes: By rank, the number that its process has in the reports, where it is a spare.
        """
        incarnation, reason = self._last.get((processes or {}).get(rank, rank), (-1, ""))
        return reason or "ended" if incarnation >= incarnations.get(rank, 0) else None


class HeartbeatTimeout:
    """How long heartbeats have not changed, by the clock of this process, while it looked.

    Time in which this process did not look, because it was stopped or busy itself, does not count.

    Args:
        longest_look_s: Seconds between two looks that count at most.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_s = longest_look_s
        self._seen: dict[int, tuple[str, float, float]] = {}

    def look(self, rank: int, beat: str, now_s: float) -> float:
        """Note a heartbeat; returns for how many seconds it has been the same."""
        last, at_s, silent_s = self._seen.get(rank, ("", now_s, 0.0))
        if beat == last:
            silent_s += min(now_s - at_s, self._longest_s)
        else:
            silent_s = 0.0
        self._seen[rank] = beat, now_s, silent_s
        return silent_s


_PAUSE_S, _BACKLOG = 0.05, 4096


class Reach:
    """A socket that listens. Local.

    Attributes:
        address: `HOST:PORT` at which other ranks try to connect.
    """

    def __init__(self) -> None:
        self._socket = _listening()
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"

    def drain(self) -> None:
        """Close the connections that were made; there is room for some thousand."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def _listening() -> socket.socket:
    """A socket at the address that gloo takes: of its interface, or of the name of this host."""
    for host in _hosts():
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)


def _hosts() -> Iterator[str]:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with contextlib.suppress(OSError):
        if interface:
            yield ipv4_of(interface)
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            yield str(address[0])


def unreachable(addresses: Mapping[int, str], limit_s: float) -> dict[int, str]:
    """Those of the ranks that no connection can be made to, each with the reason. Local.

    Args:
        addresses: Address of each rank.
        limit_s: Seconds in which a connection is tried again and again. One that the other host
            refuses is tried once.
    """
    found: dict[int, str] = {}
    waiting, end_s = dict(addresses), time.monotonic() + limit_s
    while waiting:
        # Twice at least: a network that comes back may have lost the first packet.
        for rank, error in _try(waiting, min(limit_s / 2, end_s - time.monotonic())):
            found[rank] = f"{waiting[rank]}: {os.strerror(error)}"
            if error in (0, errno.ECONNREFUSED):
                del waiting[rank]
            if error == 0:
                del found[rank]
        if time.monotonic() >= end_s:
            break
        time.sleep(_PAUSE_S if waiting else 0.0)
    return found


def _try(addresses: Mapping[int, str], limit_s: float) -> list[tuple[int, int]]:
    """Each rank with the number of the error of one connection to it, 0 if there was none."""
    errors: list[tuple[int, int]] = []
    end_s = time.monotonic() + limit_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for rank, address in addresses.items():
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            own = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            own.setblocking(False)
            error = own.connect_ex((host, int(port)))
            if error in (0, errno.EINPROGRESS):
                selector.register(own, selectors.EVENT_WRITE, rank)
            else:
                errors.append((rank, error))
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                tried = key.fileobj
                assert isinstance(tried, socket.socket)
                errors.append((key.data, tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
                selector.unregister(tried)
        late = [(key.data, errno.ETIMEDOUT) for key in selector.get_map().values()]
    return errors + late


def left_out(
    links: Mapping[int, Mapping[int, str]], living: Collection[int], newcomers: Collection[int]
) -> dict[int, str]:
    """The ranks without which all others reach each other, each with the reason.

    Of two ranks the newcomer, else the one that more others do not reach, else the higher one.

    Args:
        links: By rank, those that it does not reach, each with the reason.
        living: Ranks that are there.
        newcomers: Those of them that have come last.
    """
    cut = {
        frozenset((rank, other)): f"rank {rank} does not reach rank {other} at {reason}"
        for rank, found in links.items()
        for other, reason in found.items()
        if rank in living and other in living
    }
    gone: dict[int, str] = {}
    while cut:
        counts = Counter(rank for pair in cut for rank in pair)
        worst = max(counts, key=lambda rank: (rank in newcomers, counts[rank], rank))
        gone[worst] = "; ".join(reason for pair, reason in cut.items() if worst in pair)
        cut = {pair: reason for pair, reason in cut.items() if worst not in pair}
    return gone


T = TypeVar("T")


_OPERATION = "an operation between ranks"


class SuspectedFailure(PeerError):
    """An operation between ranks ended with an error, and no rank is known to have failed."""


def translating_errors(
    collectives: Collectives, failure: Callable[[], str | None], *, is_aborted: bool = False
) -> Collectives:
    """Interruptible collectives that raise any other error of torch's as a `SuspectedFailure`.

    Local. A connection that breaks raises the same class wherever torch finds it, so that it can be
    told from errors of a model. One rank's collectives are returned as they are.

    Args:
        collectives: Operations without gradients that move the tensors.
        failure: Function that returns why the ranks leave the generation, or None.
        is_aborted: True for a communicator that `Groups.abort_on` ends, as for `interruptible`.
    """
    if collectives.size == 1:
        return collectives
    return _TranslatingErrors(interruptible(collectives, failure, is_aborted=is_aborted))


class _TranslatingErrors(InstrumentedCollectives):
    """Passes operations on, and gives errors of torch's a class of their own."""

    def run(self, call: Call) -> Tensor:
        """The result of an operation."""
        return translate_comm_errors(_OPERATION, lambda: self.inner.run(call))

    def start(self, call: Call) -> Pending:
        """Start an operation."""
        pending = translate_comm_errors(_OPERATION, lambda: self.inner.start(call))
        return pending.around(lambda: translate_comm_errors(_OPERATION, pending.wait))


def translate_comm_errors(asked: str, operation: Callable[[], T]) -> T:
    """The result of an operation between ranks, `asked` in words. Local.

    Raises:
        SuspectedFailure: `operation` raised an error of torch's.
    """
    try:
        return operation()
    except RuntimeError as error:
        # Memory that this rank lacks is no suspicion: it would lack it again in each generation.
        if isinstance(error, PcommError | torch.OutOfMemoryError):
            raise
        raise SuspectedFailure(
            asked,
            found=headline(error),
            why="A connection broke, or the ranks made different calls; which rank is at fault is "
            "not known.",
            fix="Look for the first error of another rank; a session meets and goes on.",
        ) from error
