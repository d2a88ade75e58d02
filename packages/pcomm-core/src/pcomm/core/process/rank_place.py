"""The place of a process in a job whose ranks come and go."""

from __future__ import annotations

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
            timeout_s: Seconds that a call, and this one, may take; by default `PCOMM_TIMEOUT_S`.

        Raises:
            dist.DistNetworkError: There is no store at that address.
        """
        limit_s = environment.timeout_s() if timeout_s is None else timeout_s
        return dist.TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
