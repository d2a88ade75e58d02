"""The place of a process in a job whose ranks come and go."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pcomm.core.process import environment

__all__ = ["RankPlace"]


@dataclass(frozen=True)
class RankPlace:
    """One rank of a job, and where the store is that all ranks share.

    `ResilientRanks` gives one to each of its ranks. A process that another launcher has started,
    on whichever host, makes its own.

    Args:
        rank: Rank of this process, for life.
        size: Number of ranks of the whole job, those that are gone included.
        host: Name or address of the host of the store.
        port: Port of the store on that host.
        incarnation: Number of processes that had this rank before.
    """

    rank: int
    size: int
    host: str
    port: int
    incarnation: int = 0

    def store(self, *, timeout_s: float | None = None) -> dist.TCPStore:
        """A new connection to the store. Local.

        A connection carries one call at a time, so a thread that waits has one of its own.

        Args:
            timeout_s: Seconds that this call, and a wait for a key, may take; on Linux also those
                after which a call ends with an error whose store is on a host that sends nothing
                any more. By default `PCOMM_TIMEOUT_S`.

        Raises:
            dist.DistNetworkError: There is no store at that address.
        """
        limit_s = environment.timeout_s() if timeout_s is None else timeout_s
        made = dist.TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
        _limit_silence(self.port, limit_s)
        return made


def _limit_silence(port: int, limit_s: float) -> None:
    """Have the kernel end connections of this process to a port whose host answers no more.

    Most calls of torch's store wait for their answer without a limit. A host that has lost its
    network closes no connection, so only the kernel notices, by default after a quarter of an hour.
    Torch does not tell which file its connection is: one to the port that has no limit yet.
    """
    between_s = min(max(1, int(limit_s / 3)), 1 << 14)
    options = {
        # For what was sent and is not acknowledged; the others for an answer that never comes.
        "TCP_USER_TIMEOUT": int(min(limit_s, 1e6) * 1000),
        "TCP_KEEPIDLE": between_s,
        "TCP_KEEPINTVL": between_s,
    }
    try:
        files = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for file in files:
        with contextlib.suppress(OSError), _duplicate(file) as own:
            # An error of sockets that are not of TCP.
            is_new = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            if is_new and own.getpeername()[1] == port:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in options.items():
                    own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _duplicate(file: int) -> socket.socket:
    own = os.dup(file)
    try:
        return socket.socket(fileno=own)
    except OSError:  # no socket
        os.close(own)
        raise
