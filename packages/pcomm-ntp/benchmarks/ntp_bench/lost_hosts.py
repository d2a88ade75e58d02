"""A host whose link goes down again and again, and what each time held up the other one.

Two hosts with a replica each, and one with the store, are network namespaces of this machine. The
processes of the host that is cut off go on, so nothing tells that they are gone but their silence.
Once the others have committed a step its link comes up again, and its processes find themselves
left behind; others take their places.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from core_bench.rated_network import RatedNetwork, rated_network
from core_bench.rows import Row
from ntp_bench.kills import Kill, KilledJob, Signs, kill_rows, lose_ranks, train
from pcomm.core.process import RankPlace, ResilientRanks

TP = 2
SIGNS = Signs("the link of a host goes down, dead after 1 s", heartbeat_s=0.1, dead_after_s=1.0)
_STORE, _ADDRESS = 2, "10.77.0.3"


def lose_hosts(times: int, *, tell: Callable[[Kill], None] = lambda _: None) -> list[Kill]:
    """Take the link of a random host down, again and again. Starts processes of its own.

    Args:
        times: Number of losses.
        tell: Function that is called with each result.

    Raises:
        UnsupportedError: There are no network namespaces here, or the job did not go on in time.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with (
        rated_network(3, num_rails=1, mbit_per_s=1000.0) as network,
        tempfile.TemporaryDirectory() as folder,
        ResilientRanks(2 * TP, preload=[__name__], imports_main=False) as ranks,
    ):
        store = context.Process(target=_host_store, args=(theirs, network), daemon=True)
        store.start()
        try:
            job = _JobOnHosts(ranks, network, ours.recv(), Path(folder))
            return lose_ranks(job, times, is_replica=True, tell=tell)
        finally:
            store.kill()
            store.join()


class _JobOnHosts(KilledJob):
    """A replica on each of two hosts.

    Args:
        ranks: Ranks that are not started yet.
        network: Namespaces of the hosts of ranks and that of the store.
        port: Port of the store.
        folder: Empty folder for what the ranks write.
    """

    def __init__(
        self, ranks: ResilientRanks, network: RatedNetwork, port: int, folder: Path
    ) -> None:
        self._network = network
        super().__init__(ranks, TP, SIGNS, folder, _train_on_host, (network, port))

    def take_away(self, victims: Collection[int]) -> None:
        """Take the link of their host down."""
        self._link(victims, "down")

    def make_way(self, victims: Collection[int]) -> None:
        """Bring it up again, so that they learn that the others went on."""
        self._link(victims, "up")

    def _link(self, victims: Collection[int], state: str) -> None:
        words = f"link set {self._network.interfaces[0]} {state}"
        self._network.change(min(victims) // TP, words)


def _host_store(port: Connection, network: RatedNetwork) -> None:
    with network.inside(_STORE):
        store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    # Until this process is ended.
    port.recv()


def _train_on_host(
    place: RankPlace,
    network: RatedNetwork,
    port: int,
    tp: int,
    folder: str,
    start: int,
    signs: Signs,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = network.interfaces[0]
    with network.inside(place.rank // tp):
        train(replace(place, host=_ADDRESS, port=port), tp, folder, start, signs)


def lost_host_rows(found: Sequence[Kill], benchmark: str = "ntp lost host") -> list[Row]:
    """Median, longest and parts of the times.

    Args:
        found: What `lose_hosts` returned, at least one.
        benchmark: Name of the rows.
    """
    return kill_rows(found, f"pcomm, 2 hosts x TP{TP}, {SIGNS.words}", benchmark)
