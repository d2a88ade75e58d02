"""The connections of one communicator of gloo among the open files of this process.

Gloo offers no way to end operations that wait for a rank which is gone. Shutting the sockets of a
communicator down does: each of its operations ends with an error, whether the peer was killed, has
left too, or stands still. Gloo itself does not tell which sockets these are. Each communicator
has a poll of its own (`epoll`), which watches a socket that listens and those to the peers, and
Linux tells what a poll watches.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["OwnConnections"]

_FILES, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
# Gloo's own thread closes a connection as soon as it runs; the limit is for one that never does.
_PAUSE_S, _CLOSING_S = 0.0005, 10.0


class OwnConnections:
    """The connections that a communicator of gloo made; none where the system does not tell.

    They are known by number and by identity, since gloo closes those that break, and the number
    is another file's then.
    """

    def __init__(self) -> None:
        self._found: dict[int, int] = {}

    @classmethod
    @contextlib.contextmanager
    def recorded(cls) -> Iterator[OwnConnections]:
        """A block that makes one communicator; what is yielded has its connections afterwards.

        None where another thread of this process makes a communicator meanwhile: nothing tells
        which of the two a connection belongs to.
        """
        connections, before = cls(), {i for watched in _polls() for i in watched.values()}
        yield connections
        made: list[dict[int, int]] = []
        for watched in _polls():
            new = {number: i for number, i in watched.items() if i not in before}
            if any(_is_listening(number) for number in new):
                made.append(new)
        if len(made) == 1:
            connections._found = {n: i for n, i in made[0].items() if _is_connected(n)}

    def __bool__(self) -> bool:
        return bool(self._found)

    def shut_down(self) -> None:
        """End operations of the communicator with an error, here and on its other ranks. Local.

        On return gloo has closed them, so that what had arrived before is written, and nothing
        else will be. An operation of which a message had arrived, or was sent, in part is the one
        that gloo does not end: its wait lasts until the time limit of the communicator.
        """
        for number, identity in self._found.items():
            # A number of our own, which stays open between the comparison and the call.
            with contextlib.suppress(OSError), _socket(number) as own:
                if os.fstat(own.fileno()).st_ino == identity:
                    own.shutdown(socket.SHUT_RDWR)
        end_s = time.monotonic() + _CLOSING_S
        while any(itertools.starmap(_is_open, self._found.items())) and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        self._found.clear()


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
