"""Which ranks can connect to each other: tried with connections that carry nothing.

An error of a communicator does not tell between which ranks it has no connection. So each process
listens at the address that gloo takes, and another one that connects there knows that packets go
both ways. The kernel answers: a process that computes, or stands still, is reached.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

__all__ = ["Reach", "left_out", "unreachable"]

_PAUSE_S, _BACKLOG = 0.05, 4096
# Linux's request for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915


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
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
                asked = struct.pack("256s", interface.encode()[:15])
                found = fcntl.ioctl(own.fileno(), _SIOCGIFADDR, asked)
            yield socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            yield str(address[0])
