"""Rate-limited links between namespaces: they come and go, and count what ranks send."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core_bench.rated_network import RatedNetwork, obstacle, rated_network, traffic
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import wait_until
from pcomm.core.topology import Topology

FOLDER = Path("/run/netns")
MEBI = 1 << 20


@pytest.fixture(scope="module")
def _can_make_links() -> None:
    if reason := obstacle():
        pytest.skip(f"no rate-limited links here: {reason}")


def present(prefix: str) -> set[str]:
    return {path.name for path in FOLDER.glob(f"{prefix}*")}


@pytest.mark.usefixtures("_can_make_links")
def test_namespaces_are_there_within_the_block_and_gone_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a user's shell has; Debian's `tc` is elsewhere.
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    with rated_network(2, num_rails=2, mbit_per_s=400.0) as network:
        assert present(network.prefix) == set(network.namespaces)
        assert len(network.namespaces) == 3
        before = os.readlink("/proc/thread-self/ns/net")
        with network.inside(1):
            assert os.readlink("/proc/thread-self/ns/net") != before
            assert set(traffic()) == {"lo", "rail0", "rail1"}
        assert os.readlink("/proc/thread-self/ns/net") == before
    assert not present(network.prefix)


_CHILD = """
from core_bench.rated_network import rated_network
with rated_network(2, num_rails=1, mbit_per_s=100.0) as network:
    print(network.prefix, flush=True)
    input()
"""


@pytest.mark.usefixtures("_can_make_links")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_process_that_is_killed_leaves_nothing_behind(number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout:
        prefix = child.stdout.readline().strip()
        assert len(present(prefix)) == 3
        child.send_signal(number)
        child.wait()
    # Another process deletes them, and nobody can be asked to wait for it.
    wait_until(lambda: not present(prefix), "the end of its links")


@pytest.fixture
def leftovers() -> Iterator[list[str]]:
    """Leftovers of a process that is gone; and what is not ours, or still in use."""
    with subprocess.Popen(["true"]) as gone:
        pass
    names = [f"pcomm-{gone.pid}-0a1b2c-0", f"pcomm-{gone.pid}-0a1b2c-hub"]
    names += [f"pcomm-{os.getpid()}-0a1b2c-0", f"other-{gone.pid}-0a1b2c-0"]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.usefixtures("_can_make_links")
def test_leftovers_go_at_the_next_start_and_nothing_else_does(leftovers: list[str]) -> None:
    with rated_network(1, num_rails=1, mbit_per_s=100.0):
        assert [(FOLDER / name).exists() for name in leftovers] == [False, False, True, True]


def repeated_segments() -> int:
    """Segments that TCP has sent again in this thread's namespace, since it was made."""
    names, values = (
        line.split()
        for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def count_bytes(network: RatedNetwork) -> tuple[dict[str, int], int]:
    """Bytes this rank sends for an all-gather of 2 MiB on rail 0 and an all-to-all on rail 1.

    Beside them, how many segments were sent twice: TCP does so when an acknowledgement is late,
    which a busy machine makes it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rails = [CommOptions(threads=1, interface=name, strict=True) for name in network.interfaces]
    specs = [GroupSpec("dp", f"rail {number}", rail) for number, rail in enumerate(rails)]
    with network.inside(rank), open_groups(Topology({"dp": size}), specs) as groups:
        first, second = (groups["dp", spec.role].collectives for spec in specs)
        # The world is that of the test's ranks, on loopback of the outer namespace.
        dist.barrier()
        before, repeated = traffic(), repeated_segments()
        found = first.all_gather(torch.full((2 * MEBI // 4 // size,), float(rank)))
        second.all_to_all(torch.zeros(MEBI // 4))
        dist.barrier()
        after, repeated = traffic(), repeated_segments() - repeated
        assert found[:: found.numel() // size].tolist() == list(map(float, range(size)))
    sent = {name: after[name].sent_bytes - before[name].sent_bytes for name in after}
    return sent, repeated


def check_bytes(network: RatedNetwork) -> None:
    """Each rail of this rank carries what its group sends, and loopback nothing."""
    (sent, repeated), size = count_bytes(network), dist.get_world_size()
    assert sent["lo"] == 0
    for rail, whole in (("rail0", 2 * MEBI), ("rail1", MEBI)):
        ideal = whole * (size - 1) // size
        # Headers are 66 of every 9014 bytes at most, and acknowledgements of what came the
        # other way are as many; a few KiB of bridge and address lookup come on top.
        once = ideal * (1 + 2 * 66 / 9014) + 8192
        assert ideal < sent[rail] < once + repeated * 9014


@pytest.fixture
def links_of_two(_can_make_links: None) -> Iterator[RatedNetwork]:
    with rated_network(2, num_rails=2, mbit_per_s=10_000.0) as network:
        yield network


@pytest.fixture
def links_of_four(_can_make_links: None) -> Iterator[RatedNetwork]:
    with rated_network(4, num_rails=2, mbit_per_s=10_000.0) as network:
        yield network


@ranks(2)
def test_interfaces_count_what_two_ranks_send(rank: int, links_of_two: RatedNetwork) -> None:
    check_bytes(links_of_two)


@ranks(4)
def test_interfaces_count_what_four_ranks_send(rank: int, links_of_four: RatedNetwork) -> None:
    check_bytes(links_of_four)
