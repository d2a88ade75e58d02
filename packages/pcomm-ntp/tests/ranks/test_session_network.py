"""Sessions whose network fails: each rank, and the store, in a network namespace of its own."""

from __future__ import annotations

import multiprocessing as mp
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from core_bench.rated_network import RatedNetwork, obstacle, rated_network
from ntp_support.resilient_training import PRELOAD, train_on_hosts
from ntp_support.seen_training import assert_seen
from ntp_support.session_events import hold_for, host_store
from pcomm.core import Topology
from pcomm.core.errors import FencedError, PeerError
from pcomm.core.process import RankPlace, ResilientRanks
from pcomm.core.testing.programs import scaled_s, wait_until
from pcomm.ntp import Failures, StoreLostError
from pcomm.ntp.session import Timeouts

STORE = 4
"""Number of the namespace with the store; below it those of ranks."""


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


class Hosts:
    """A store in a namespace, and ways to break the network."""

    def __init__(self, network: RatedNetwork) -> None:
        self.network = network
        # It ends when the other end of the pipe is closed.
        self._pipe, theirs = mp.Pipe()
        self._process = mp.get_context("forkserver").Process(
            target=host_store, args=(theirs, network, STORE), daemon=True
        )
        self._process.start()
        self.port: int = self._pipe.recv()
        with network.inside(STORE):
            self.store: dist.TCPStore = RankPlace(0, 1, address(STORE), self.port).store()

    def args(self, *args: Any) -> tuple[Any, ...]:
        """Arguments of `train_on_hosts`."""
        return self.network, address(STORE), self.port, *args

    def cut(self, number: int, *others: int) -> None:
        """Lose, without an error, all packets of a namespace to some others."""
        for other in others:
            entry = f"neigh replace {address(other)} lladdr 02:00:00:00:00:01 nud permanent"
            self._ip(number, f"{entry} dev {self.network.interfaces[0]}")

    def disconnect(self, number: int) -> None:
        """Lose all packets from and to a namespace."""
        # At the hub, so that the host itself has a network that seems to work.
        self._ip(-1, f"link set port{number}.0 down")

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _ip(self, number: int, words: str) -> None:
        name = self.network.namespaces[number]
        subprocess.run(["ip", "-n", name, *words.split()], check=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := obstacle():
        pytest.skip(f"no network namespaces here: {reason}")
    with rated_network(STORE + 1, num_rails=1, mbit_per_s=1000.0) as network:
        found = Hosts(network)
        yield found
        found.close()


def test_a_store_whose_host_has_no_network_ends_every_rank(hosts: Hosts) -> None:
    timeouts = {"timeouts": Timeouts(agree_s=3.0)}
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 1, "tp": 2})
        # Rank 0 asks the store in each step, and hangs in it.
        hold = partial(hold_for, key="go", step=1)
        ranks.start(train_on_hosts, hosts.args(topology, 10**6, (), timeouts, hold))
        wait_until(lambda: hosts.store.add("held", 0) == 2, "two ranks that train")
        hosts.store.set("go", "1")
        # Until then they call the store themselves, whose error would be torch's.
        wait_until(lambda: hosts.store.add("released", 0) == 2, "two ranks that go on")
        hosts.disconnect(STORE)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert all(isinstance(report.error, StoreLostError) for report in reports.values()), reports


def test_a_newcomer_that_reaches_no_rank_is_refused_and_the_others_go_on(hosts: Hosts) -> None:
    options = {
        "failures": Failures.from_global_ranks([2]),
        "timeouts": Timeouts(heartbeat_s=0.1, dead_after_s=scaled_s(2.0)),
    }
    hosts.cut(2, 0, 1)
    hold = partial(hold_for, key="go", step=1)
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 1, "tp": 3})
        ranks.start(train_on_hosts, hosts.args(topology, 3, (), options, hold))
        refused = ranks.wait([2], timeout_s=scaled_s(60.0))[2]
        hosts.store.set("go", "1")
        reports = ranks.wait([0, 1], timeout_s=scaled_s(60.0))
    assert isinstance(refused.error, PeerError), refused
    # One that had not begun yet is not named.
    assert re.search(r"from 10.77.0.3:\d+ to rank ([01]) at 10.77.0.[12]:", refused.error.found)
    seen = {rank: report.result for rank, report in reports.items()}
    assert_seen(seen, 3)
    assert all(own.generations == [(0, 1)] for own in seen.values())


def test_a_link_between_two_ranks_that_is_cut_costs_one_of_them(hosts: Hosts) -> None:
    timeouts = Timeouts(
        heartbeat_s=0.1,
        dead_after_s=scaled_s(1.5),
        agree_s=scaled_s(2.0),
        operation_s=scaled_s(2.0),
    )
    hold = partial(hold_for, key="go", step=1)
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 3, "tp": 1})
        options = {"timeouts": timeouts}
        ranks.start(train_on_hosts, hosts.args(topology, 3, (), options, hold))
        wait_until(lambda: hosts.store.add("held", 0) == 3, "three ranks that wait")
        hosts.cut(1, 2)
        hosts.store.set("go", "1")
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    assert isinstance(reports[2].error, FencedError), reports
    # Both have tried.
    assert re.search(
        "rank (1 does not reach rank 2|2 does not reach rank 1)", reports[2].error.found
    )
    seen = {rank: reports[rank].result for rank in (0, 1)}
    assert_seen(seen, 3)
    for own in seen.values():
        # On a busy machine an operation may be late, and its generation begin anew.
        assert sorted(set(own.generations)) == [(0, 1), (0, 1, 2)]
        assert list(own.gone) == [2]
