"""Communicators of torch: named, connected within a limit, shared and closed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.gloo import GlooCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.control import format_ranks
from pcomm.core.control.without_control import end_if_unused, unconnected_default
from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups.spec import Granted

__all__ = [
    "Communicator",
    "ConnectingStore",
    "OwnConnections",
    "close_communicator",
    "communicator_of",
    "new_collectives",
    "new_communicator",
]


# Torch's process groups take no attributes, so what belongs to one is kept beside it: as long as
# the process group lives, and no longer.
_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


class Communicator:
    """One torch process group with its collectives. Made by `communicator_of` alone.

    It holds the process group weakly: the owner, torch's registry for most, decides how long it
    lives, and a forgotten handle keeps no connections and no threads.

    Attributes:
        collectives: Operations without gradients.
        differentiable: Operations with gradients.
        connections: Connections of its own; none where they are not known.
        found_in: Store in which its members found each other, if it is not that of the caller.
        abort: Abort of the communicator, once it has begun; only those on a device have one.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.connections = OwnConnections()
        self.found_in: ConnectingStore | None = None
        self.abort: Abort | None = None
        self._inner = new_collectives(process_group)
        self.collectives: Collectives = self._inner
        self.differentiable: Collectives = differentiable(self._inner)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group.

        Raises:
            ClosedError: It was closed.
        """
        return self._inner.process_group

    def rest(self) -> None:
        """End threads that have nothing to do; the next operation begins one again. Local."""
        self._inner.rest()

    def close(self) -> None:
        """Refuse all further operations and end the thread of the queue. Local."""
        self._inner.close()

    def abandon(self) -> None:
        """Refuse all further operations, and to wait for those in flight. Local."""
        self._inner.abandon()


def communicator_of(process_group: dist.ProcessGroup) -> Communicator:
    """The communicator of a process group, the same one at each call. Local.

    Args:
        process_group: A group that this rank belongs to.
    """
    found = _communicators.get(process_group)
    if found is None:
        found = _communicators[process_group] = Communicator(process_group)
    return found


def new_collectives(process_group: dist.ProcessGroup) -> DistributedCollectives:
    """New collectives, the fastest for the group's backend. Local; for `Communicator` alone.

    Two for one process group would number its messages independently. A group that has gloo for
    tensors on the CPU and another backend beside it counts as the other one.
    """
    backend = dist.get_backend(process_group)
    # One with options of its own has a longer name.
    is_gloo = "gloo" in backend and ":" not in backend
    return GlooCollectives(process_group) if is_gloo else DistributedCollectives(process_group)


def new_communicator(
    name: str,
    ranks: Sequence[int],
    granted: Granted,
    *,
    store: dist.Store,
    rank: int,
    description: str,
    connect_s: float = math.inf,
) -> dist.ProcessGroup:
    """A communicator of `ranks`, owned by the caller. Collective: its members call it, no others.

    Args:
        name: Name that is the same on all members, and never used before in this job.
        ranks: Global ranks, ascending.
        granted: Backend and options.
        store: Store in which the members find each other.
        rank: Global rank of this process, one of `ranks`.
        description: Name in torch's own reports.
        connect_s: Seconds to wait for members to connect, on gloo; at most the limit of operations.

    Raises:
        PeerTimeoutError: A member did not come to connect.
        RuntimeError: Torch's, if a member failed while it connected.
    """
    make = partial(_new_process_group, name, ranks, granted, rank, description)
    with unconnected_default(store, rank, 1 + ranks[-1]):
        if granted.backend.startswith("gloo"):
            return _connected(make, store, connect_s, f"{description}: ranks {format_ranks(ranks)}")
        return make(store)


def _connected(
    make: Callable[[dist.Store], dist.ProcessGroup],
    store: dist.Store,
    connect_s: float,
    asked: str,
) -> dist.ProcessGroup:
    """A group that connects when it is made, with its connections; `asked` is for the message."""
    found_in = ConnectingStore(store, connect_s)
    try:
        with OwnConnections.recorded() as connections:
            made = make(found_in)
    except RuntimeError as problem:
        if found_in.timed_out_s is None:
            raise
        raise PeerTimeoutError(
            asked,
            found=f"a rank did not come to connect within {found_in.timed_out_s:g} s",
            why="Each member of a communicator connects to every other one.",
            fix="Look for an error of one of these ranks; raise PCOMM_TIMEOUT_S if they are slow.",
        ) from problem
    found_in.lift()
    communicator = communicator_of(made)
    communicator.found_in, communicator.connections = found_in, connections
    return made


def _new_process_group(
    name: str,
    ranks: Sequence[int],
    granted: Granted,
    rank: int,
    description: str,
    store: dist.Store,
) -> dist.ProcessGroup:
    backend = dist.Backend(granted.backend)
    timeout = granted.timeout or distributed_c10d._get_default_timeout(backend)
    if granted.pg_options is not None:
        # Torch warns where the two differ.
        granted.pg_options._timeout = timeout
    is_nccl = "nccl" in granted.backend
    with _without_splitting(distributed_c10d._get_default_group()) as device:
        if is_nccl and device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]
            backend_options=granted.pg_options,
            timeout=timeout,
            # With it NCCL connects here and not in the first operation, so that a network which
            # does not work, or a rank that is gone, is known when groups open. Gloo has no device.
            device_id=device if is_nccl else None,
            group_desc=description,
        )
    assert isinstance(made, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[made] = {r: i for i, r in enumerate(ranks)}
    return made


@contextmanager
def _without_splitting(default: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """Make torch open connections of their own for a new group; yields the device of the default.

    With a device bound to the default group, torch splits new NCCL groups off that group's
    communicator, and then every rank of it has to take part, members or not. Here only the members
    do: others may belong to another topology, or have failed.
    """
    device: torch.device | None = default.bound_device_id
    if device is None:
        yield None
        return
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


def close_communicator(process_group: dist.ProcessGroup) -> None:
    """Close a group of `new_communicator`, unless torch.distributed has ended since. Collective."""
    communicator_of(process_group).close()
    # Torch's registry: empty after its end, and without this one after a new beginning.
    if process_group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(process_group)
        end_if_unused()


class Abort:
    """Torch's abort of one communicator, on a thread of its own, begun at once.

    Args:
        process_group: Group whose backend has an abort.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None
        run = partial(self._run, process_group.abort)
        threading.Thread(target=run, name="pcomm aborting", daemon=True).start()

    def _run(self, abort: Callable[[], None]) -> None:
        try:
            abort()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def problem(self, end_s: float) -> str | None:
        """Why it has not ended well by a moment of the monotonic clock; None where it has."""
        if not self._ended.wait(max(0.0, end_s - time.monotonic())):
            return "its abort has not ended in time"
        return None if self._error is None else f"its abort failed: {self._error}"


class ConnectingStore(dist.Store):
    """Passes every call on to `store`; until `lift`, no wait is longer than `limit_s` seconds.

    Gloo waits in the store for the address of each member, as long as an operation may take: half
    an hour unless the group says otherwise. A shorter limit of the communicator itself would stay
    with its sends and receives, which torch offers no way to change.

    A communicator refers to this object without keeping it alive, so its owner does.

    Args:
        store: Store that the members share.
        limit_s: Longest wait, in seconds.

    Attributes:
        timed_out_s: Seconds of a wait that ended without its keys; None if there was none.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        super().__init__()
        self._store, self._limit_s = store, limit_s
        self.timed_out_s: float | None = None

    def lift(self) -> None:
        """Let waits be as long as their caller says. Local."""
        self._limit_s = float("inf")

    # Torch calls these by name and place. It gives values as bytes.

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are there."""
        if timeout is None:
            return self._store.wait(keys)
        limit_s = min(self._limit_s, timeout.total_seconds())
        try:
            return self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError:
            self.timed_out_s = limit_s
            raise

    def set(self, key: str, value: str) -> None:
        """Pass on."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Pass on."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Pass on."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Pass on."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Pass on."""
        return self._store.compare_set(key, expected_value, desired_value)

    def deleteKey(self, key: str) -> bool:
        """Pass on."""
        return self._store.delete_key(key)

    def getNumKeys(self) -> int:
        """Pass on."""
        return self._store.num_keys()


_FILES, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
# Gloo's own thread closes a connection as soon as it runs. One that has run for so long without
# closing it never will; the other limit is for one that never runs, or is not known.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_SPINNING_S, _CLOSING_S = 0.25, 10.0
_TASKS, _NAME_OF_LOOP = Path("/proc/self/task"), "gloo_tcp_loop"


class OwnConnections:
    """The connections that a communicator of gloo made; none where the system does not tell.

    They are known by number and by identity, since gloo closes those that break, and the number
    is another file's then.
    """

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._loop: Path | None = None

    @classmethod
    @contextlib.contextmanager
    def recorded(cls) -> Iterator[OwnConnections]:
        """A block that makes one communicator; what is yielded has its connections afterwards.

        None where another thread of this process makes a communicator meanwhile: nothing tells
        which of the two a connection belongs to.
        """
        connections, before = cls(), {i for watched in _polls() for i in watched.values()}
        loops = _loops()
        yield connections
        made: list[dict[int, int]] = []
        for watched in _polls():
            new = {number: i for number, i in watched.items() if i not in before}
            if any(_is_listening(number) for number in new):
                made.append(new)
        if len(made) == 1:
            connections._found = {n: i for n, i in made[0].items() if _is_connected(n)}
            own = _loops() - loops
            connections._loop = own.pop() if len(own) == 1 else None

    def __bool__(self) -> bool:
        return bool(self._found)

    def shut_down(self) -> None:
        """End operations of the communicator with an error, here and on its other ranks. Local.

        On return gloo has closed them, so that what had arrived before is written, and nothing
        else will be. An operation of which a message had arrived, or was sent, in part is the one
        that gloo does not end: its wait lasts until the time limit of the communicator. If such an
        operation has ended before, gloo's thread polls the connection in a busy loop and never
        closes it; this returns then, and freeing the communicator, which follows, ends the loop.
        """
        for number, identity in self._found.items():
            # A number of our own, which stays open between the comparison and the call.
            with contextlib.suppress(OSError), _socket(number) as own:
                if os.fstat(own.fileno()).st_ino == identity:
                    own.shutdown(socket.SHUT_RDWR)
        end_s, spinning_s = time.monotonic() + _CLOSING_S, _run_s(self._loop) + _SPINNING_S
        pause_s = _PAUSE_S
        while any(itertools.starmap(_is_open, self._found.items())):
            if time.monotonic() > end_s or _run_s(self._loop) > spinning_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._found.clear()


def _loops() -> set[Path]:
    """Gloo's threads of this process; none where the system does not tell."""
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().strip() == _NAME_OF_LOOP:
                    found.add(task)
    return found


def _run_s(loop: Path | None) -> float:
    """Seconds that a thread has run; 0 where that is not known, or it has ended."""
    if loop is not None:
        with contextlib.suppress(OSError):
            return int((loop / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _polls() -> Iterator[dict[int, int]]:
    """Number and identity of the sockets that each poll of this process watches."""
    try:
        numbers = [int(name) for name in os.listdir(_FILES)]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.readlink(_FILES / str(number)) == "anon_inode:[eventpoll]":
                watched = map(int, _WATCHED.findall((_DETAILS / str(number)).read_text()))
                yield dict(_sockets(watched))


def _sockets(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    for number in numbers:
        with contextlib.suppress(OSError):
            found = os.fstat(number)
            if stat.S_ISSOCK(found.st_mode):
                yield number, found.st_ino


def _is_open(number: int, identity: int) -> bool:
    with contextlib.suppress(OSError):
        return os.fstat(number).st_ino == identity
    return False


def _socket(number: int) -> socket.socket:
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:  # another kind of file by now
        os.close(own)
        raise


def _is_listening(number: int) -> bool:
    with contextlib.suppress(OSError), _socket(number) as own:
        return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _is_connected(number: int) -> bool:
    with contextlib.suppress(OSError), _socket(number) as own:
        own.getpeername()
        return True
    return False
