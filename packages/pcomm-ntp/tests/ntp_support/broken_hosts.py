"""Hosts of ranks, and of the store, in network namespaces, and ways to break their network."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from core_bench.rated_network import RatedNetwork, rated_network
from ntp_support.session_events import host_store
from pcomm.core.process import RankPlace

__all__ = ["HostPlaces", "Hosts", "hosts_of"]


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


@dataclass(frozen=True)
class HostPlaces:
    """Where the ranks of a job and its store are; for `train_on_hosts`.

    Args:
        network: Namespaces of the hosts.
        store: Address of the store.
        port: Its port.
        ranks_each: Ranks of each host.
        is_named: True where the user names the interface; else the name of each host is that of
            loopback.
    """

    network: RatedNetwork
    store: str
    port: int
    ranks_each: int = 1
    is_named: bool = True


class Hosts:
    """A store on one host, and ways to break the network.

    Args:
        network: Namespaces of the hosts.
        store_on: Host of the store.
    """

    def __init__(self, network: RatedNetwork, store_on: int) -> None:
        self.network, self._store_on = network, store_on
        # It ends when the other end of the pipe is closed.
        self._pipe, theirs = mp.Pipe()
        self._process = mp.get_context("forkserver").Process(
            target=host_store, args=(theirs, network, store_on), daemon=True
        )
        self._process.start()
        self.port: int = self._pipe.recv()
        with network.inside(store_on):
            self.store: dist.TCPStore = RankPlace(0, 1, address(store_on), self.port).store()

    def places(self, ranks_each: int = 1, *, is_named: bool = True) -> HostPlaces:
        """The places of a job's ranks."""
        return HostPlaces(self.network, address(self._store_on), self.port, ranks_each, is_named)

    def cut(self, number: int, *others: int) -> None:
        """Lose, without an error, all packets of a host to some others."""
        for other in others:
            entry = f"neigh replace {address(other)} lladdr 02:00:00:00:00:01 nud permanent"
            self.network.change(number, f"{entry} dev {self.network.interfaces[0]}")

    def end_unacknowledged(self, *numbers: int) -> None:
        """Have the kernel of hosts end a connection whose peer acknowledges nothing for 3 s.

        The peer's kernel acknowledges, so a process that is late does not end one. By default it
        takes a quarter of an hour.
        """
        for number in numbers:
            with self.network.inside(number):
                # Retransmissions: after 0.2 s, and each time after twice as long.
                Path("/proc/sys/net/ipv4/tcp_retries2").write_text("3")

    def disconnect(self, number: int) -> None:
        """Lose all packets from and to a host."""
        # At the hub, so that the host itself has a network that seems to work.
        self.network.change(-1, f"link set port{number}.0 down")

    def take_down(self, number: int) -> None:
        """Take the link of a host down, so that it has none; its processes go on."""
        self.network.change(number, f"link set {self.network.interfaces[0]} down")

    def slow_down(self, number: int, rate: str) -> None:
        """Give both ways of a host's link another rate, in the words of tc."""
        for host, device in ((number, self.network.interfaces[0]), (-1, f"port{number}.0")):
            words = f"qdisc replace dev {device} root tbf rate {rate} burst 72kb limit 64mb"
            self.network.change(host, words, program="tc")

    def close(self) -> None:
        """End the store."""
        self._process.kill()
        self._process.join()


@contextmanager
def hosts_of(number: int, *, store_on: int) -> Iterator[Hosts]:
    """So many hosts, one of which has the store."""
    with rated_network(number, num_rails=1, mbit_per_s=1000.0) as network:
        found = Hosts(network, store_on)
        try:
            yield found
        finally:
            found.close()
