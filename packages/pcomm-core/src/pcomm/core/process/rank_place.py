"""A rank's place in a job whose ranks may die: its number, and the store that all ranks share."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pcomm.core import environment
from pcomm.core.errors import ConfigError, PeerTimeoutError
from pcomm.core.process.launchers import launched_place

__all__ = ["RankPlace"]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankPlace:
    """One rank of a job, and where the store is that all ranks share.

    `ResilientRanks` gives one to each of its ranks. A process that another launcher has started,
    on whichever host, makes its own by `from_environment`.

    Args:
        rank: Rank of this process, for life.
        size: Number of ranks of the whole job, those that are gone included.
        host: Name or address of the host of the store.
        port: Port of the store on that host.
        incarnation: Number of processes that had this rank before.
        prefix: Word before all keys of this rank's connections; empty for none.
    """

    rank: int
    size: int
    host: str
    port: int
    incarnation: int = 0
    prefix: str = ""

    @classmethod
    def from_environment(
        cls,
        store: str | None = None,
        *,
        rank: int | None = None,
        size: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> RankPlace:
        """The place of a process that a launcher has started. Local; connects to nothing.

        | launcher | rank | number of ranks |
        |---|---|---|
        | torchrun, Ray Train, scripts | `RANK` | `WORLD_SIZE` |
        | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` |
        | indexed Kubernetes Job | `JOB_COMPLETION_INDEX` | `PCOMM_RANKS` |

        Args:
            store: `HOST:PORT` of the store, an address of IPv6 in brackets; by default
                `PCOMM_STORE`.
            rank: The rank, if no launcher tells it.
            size: The number of ranks, if no launcher tells it; by default `PCOMM_RANKS`.
            environ: Variables to read; `os.environ` if absent.

        Raises:
            ConfigError: The rank, the number or the address is missing, or what tells them
                contradicts itself.
        """
        found = "no address"
        address = environment.read(environment.STORE, environ) if store is None else None
        if store is not None:
            with contextlib.suppress(ValueError):
                address = environment.host_and_port(store)
            found = f"{store!r}, which is no HOST:PORT"
        if address is None:
            raise ConfigError(
                "the store of the job",
                found=found,
                why="The ranks of a job find each other in one store, which outlives them.",
                fix="Start one by `pcomm store --port P --host ADDRESS`, and give its HOST:PORT by "
                "--store or PCOMM_STORE, an address of IPv6 in brackets.",
            )
        own, number = launched_place(rank, size, environ)
        return cls(own, number, *address)

    @property
    def address(self) -> str:
        """`HOST:PORT` of the store."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def wait_for_store(self, *, limit_s: float | None = None) -> None:
        """Wait until the store's name resolves, and something listens there. Local.

        It is tried again after pauses that become longer, up to some seconds: the name of a host
        that has just started is known late.

        Args:
            limit_s: Seconds to wait; by default `PCOMM_TIMEOUT_S`.

        Raises:
            PeerTimeoutError: There was none in time; has the last reason.
        """
        limit_s = environment.timeout_s() if limit_s is None else limit_s
        end_s, pause_s, is_told = time.monotonic() + limit_s, 0.05, False
        while True:
            left_s = end_s - time.monotonic()
            try:
                socket.create_connection((self.host, self.port), timeout=max(0.1, left_s)).close()
                return
            except OSError as error:
                reason = str(error)
            if time.monotonic() + pause_s > end_s:
                raise PeerTimeoutError(
                    f"rank {self.rank}: the store at {self.address}",
                    found=f"{reason}, for {limit_s:g} s",
                    why="The ranks of a job find each other in a store, which is there before them "
                    "and outlives them.",
                    fix="Start `pcomm store` on that host, at an address that this host reaches; "
                    "PCOMM_TIMEOUT_S is how long a rank waits for it.",
                )
            if not is_told:
                _log.warning(
                    "no store at %s yet (%s): trying for %g s", self.address, reason, limit_s
                )
                is_told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 3.0)

    def store(self, *, timeout_s: float | None = None) -> dist.Store:
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
        return dist.PrefixStore(self.prefix, made) if self.prefix else made


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
