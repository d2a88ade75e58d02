"""A network of rate-limited links between ranks of one Linux machine.

Loopback is as fast as the processor, so it says nothing about what a network makes of a schedule.
Here every rank has a network namespace of its own; on each rail a virtual cable joins it to a
bridge in one more namespace, the hub, and a token bucket limits both ends of the cable, so that
what a rank sends and what it receives have the same limit each. Queues are long enough to lose
nothing, as on InfiniBand; there is no added delay. TCP does as little of its own as it can: its
window only grows, and connections of a rank take turns on its link, like queue pairs of an adapter.

A process of ours waits at the end of a pipe and deletes the namespaces when the pipe closes: at
the end of the `with` block, and as well when this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["LinkTraffic", "RatedNetwork", "obstacle", "rated_network", "traffic"]

_FOLDER = Path("/run/netns")
_NAME = re.compile(r"pcomm-(\d+)-[0-9a-f]+-(\d+|hub)")
# Jumbo frames, so that headers are 0.7 % of what a link carries.
_MTU = 9000
# One packet as the kernel hands it to a virtual cable, which must fit into the bucket whole.
_BURST_BYTES = 72 * 1024
_QUEUE_BYTES = 64 << 20
# Reno slows down when something is lost, which never happens here; other algorithms go by delays,
# which a long queue is full of. And a connection may have only so much in the queue, since
# otherwise a whole message of one goes before the next one's, and links behind run dry meanwhile.
# Nor is the end of a message sent twice because a busy machine was late to acknowledge it.
_SETTINGS = {
    "tcp_congestion_control": "reno",
    "tcp_limit_output_bytes": "65536",
    "tcp_early_retrans": "0",
}
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class LinkTraffic:
    """What one interface has carried since it was made, with all headers."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class RatedNetwork:
    """Namespaces that exist while the block of `rated_network` runs. Pickles, so ranks get it.

    Args:
        prefix: First part of the names of the namespaces.
        num_ranks: Namespaces for ranks.
        num_rails: Links of each rank.
        mbit_per_s: Rate of a link each way, in 10^6 bits a second.
    """

    prefix: str
    num_ranks: int
    num_rails: int
    mbit_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """What a link carries each way, headers included."""
        return self.mbit_per_s * 1e6 / 8

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of a rank's interfaces, one for each rail; the same in every namespace."""
        return tuple(f"rail{rail}" for rail in range(self.num_rails))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Names of the namespaces, one for each rank, then the hub."""
        return tuple(f"{self.prefix}-{rank}" for rank in [*range(self.num_ranks), "hub"])

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """Be in a rank's namespace: this thread, and those that it starts. Local.

        Sockets stay where they were made, so communicators made before still work, and those made
        here work after the block.
        """
        with open("/proc/thread-self/ns/net") as before, open(_FOLDER / self.namespaces[rank]) as f:
            _enter(f.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def change(self, host: int, words: str, *, program: str = "ip") -> None:
        """Run a command of iproute2 in a namespace, as root. Local.

        Args:
            host: Number of a rank, or -1 for the hub.
            words: Arguments behind `ip -n NAMESPACE`, such as `link set rail0 down`.
            program: `ip` or `tc`.
        """
        _run([program, "-n", self.namespaces[host], *words.split()])


@contextmanager
def rated_network(num_ranks: int, *, num_rails: int, mbit_per_s: float) -> Iterator[RatedNetwork]:
    """Make the namespaces and links, and take them away again. Called by one process.

    What earlier processes left behind is removed first.

    Args:
        num_ranks: Namespaces for ranks.
        num_rails: Separate networks that join all ranks.
        mbit_per_s: Rate of each link each way, in 10^6 bits a second.

    Raises:
        ConfigError: Numbers that make no network.
        UnsupportedError: Not Linux, not root, no iproute2, or a kernel that refuses.
    """
    asked = f"rated_network({num_ranks}, num_rails={num_rails}, mbit_per_s={mbit_per_s})"
    if not 1 <= num_ranks <= 250 or not 1 <= num_rails <= 9 or not mbit_per_s >= 1:
        raise ConfigError(
            asked,
            found="a number out of range",
            why="Ranks and rails are numbered in addresses and names, and traffic needs a rate.",
            fix="Use 1 to 250 ranks, 1 to 9 rails, and at least 1 Mbit/s.",
        )
    if reason := _missing():
        raise _refused(asked, reason)
    _remove_leftovers()
    prefix = f"pcomm-{os.getpid()}-{secrets.token_hex(3)}"
    network = RatedNetwork(prefix, num_ranks, num_rails, mbit_per_s)
    sweeper = _start_sweeper(network.namespaces)
    try:
        try:
            _build(network)
        except subprocess.CalledProcessError as problem:
            said = problem.stderr.strip().splitlines()
            raise _refused(asked, f"{problem.cmd[0]}: {said[0] if said else problem}") from problem
        yield network
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()


def obstacle() -> str:
    """Why `rated_network` cannot work here; empty where it can. Tries it, in tens of ms. Local."""
    try:
        with rated_network(1, num_rails=1, mbit_per_s=100.0):
            return ""
    except UnsupportedError as problem:
        return problem.found


def traffic() -> Mapping[str, LinkTraffic]:
    """What each interface of this thread's namespace has carried. Local."""
    found = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        found[name.strip()] = LinkTraffic(int(columns[8]), int(columns[0]))
    return found


def _remove_leftovers() -> list[str]:
    """Delete namespaces of ours whose process is gone, and say which. Local."""
    removed = []
    for path in sorted(_FOLDER.glob("pcomm-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and not Path("/proc", match[1]).exists():
            # Another process may have been quicker.
            subprocess.run(
                ["ip", "netns", "delete", path.name],
                capture_output=True,
                check=False,
                env=_programs(),
            )
            removed.append(path.name)
    return removed


def _missing() -> str:
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    if os.geteuid() != 0:
        return f"user {os.geteuid()}, not root"
    path = _programs()["PATH"]
    absent = [program for program in ("ip", "tc") if shutil.which(program, path=path) is None]
    return f"no program {' or '.join(absent)} in {path}" if absent else ""


def _programs() -> dict[str, str]:
    """The environment with the folders of iproute2 on the PATH, which shells of users leave out."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def _refused(asked: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        asked,
        found=reason,
        why="Network namespaces with rate-limited links are made by iproute2, as root on Linux.",
        fix="Run as root with CAP_NET_ADMIN and CAP_SYS_ADMIN, with the package iproute2 "
        "installed.",
    )


def _start_sweeper(names: Sequence[str]) -> subprocess.Popen[bytes]:
    # In a session of its own, where Ctrl-C does not reach it. The pipe is not inherited by others.
    script = 'cat >/dev/null; for name in "$@"; do ip netns delete "$name"; done'
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=_programs(),
    )


def _build(network: RatedNetwork) -> None:
    *ranks, hub = network.namespaces
    for name in network.namespaces:
        _run(["ip", "netns", "add", name])
    rate = f"{network.mbit_per_s * 1e6:.0f}bit"
    bucket = f"root tbf rate {rate} burst {_BURST_BYTES}b limit {_QUEUE_BYTES}b"
    links: list[str] = []
    ports = [f"link add bridge{rail} type bridge" for rail in range(network.num_rails)]
    ports += [f"link set bridge{rail} mtu {_MTU} up" for rail in range(network.num_rails)]
    port_limits: list[str] = []
    for rank, name in enumerate(ranks):
        for rail, interface in enumerate(network.interfaces):
            port = f"port{rank}.{rail}"
            links.append(f"link add {interface} netns {name} type veth peer {port} netns {hub}")
            # No address of IPv6, which a communicator that is given an interface might take.
            ports.append(f"link set {port} mtu {_MTU} addrgenmode none master bridge{rail} up")
            port_limits.append(f"qdisc add dev {port} {bucket}")
    _run(["ip", "-batch", "-"], links)
    _run(["ip", "-n", hub, "-batch", "-"], ports)
    _run(["tc", "-n", hub, "-batch", "-"], port_limits)
    for rank, name in enumerate(ranks):
        ends, limits = ["link set lo up"], []
        for rail, interface in enumerate(network.interfaces):
            ends.append(f"link set {interface} mtu {_MTU} addrgenmode none up")
            ends.append(f"address add 10.77.{rail}.{rank + 1}/24 dev {interface}")
            limits.append(f"qdisc add dev {interface} {bucket}")
        _run(["ip", "-n", name, "-batch", "-"], ends)
        _run(["tc", "-n", name, "-batch", "-"], limits)
        settings = [f"echo {value} > /proc/sys/net/ipv4/{key}" for key, value in _SETTINGS.items()]
        _run(["ip", "netns", "exec", name, "sh", "-e"], settings)


def _run(command: Sequence[str], lines: Sequence[str] = ()) -> None:
    text = "".join(f"{line}\n" for line in lines)
    subprocess.run(command, input=text, text=True, capture_output=True, check=True, env=_programs())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
