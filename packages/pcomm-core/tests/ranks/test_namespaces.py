"""Rate-limited links between namespaces: they come and go, and count what ranks send."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core_bench import rated_network as namespaces
from core_bench.rated_network import RatedNetwork, obstacle, rated_network, traffic
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec, grant
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
def test_namespaces_are_there_within_the_block_and_gone_after_it() -> None:
    with rated_network(2, num_rails=2, mbit_per_s=400.0) as network:
        assert present(network.prefix) == set(network.namespaces)
        assert len(network.namespaces) == 3
        before = os.readlink("/proc/thread-self/ns/net")
        with network.inside(1):
            assert os.readlink("/proc/thread-self/ns/net") != before
            assert set(traffic()) == {"lo", "rail0", "rail1"}
        assert os.readlink("/proc/thread-self/ns/net") == before
    assert not present(network.prefix)


@pytest.mark.usefixtures("_can_make_links")
def test_both_ends_of_every_link_have_the_limit() -> None:
    with rated_network(3, num_rails=2, mbit_per_s=250.0) as network:
        counts = []
        for name in network.namespaces:
            command = ["tc", "-n", name, "qdisc"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            counts.append(len(re.findall(r"qdisc tbf .* dev \S+ root .* rate 250Mbit", shown)))
    assert counts == [2, 2, 2, 6]


@pytest.mark.usefixtures("_can_make_links")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_ctrl_c_leaves_nothing_behind(error: type[BaseException]) -> None:
    seen: list[str] = []

    def fail() -> None:
        with rated_network(1, num_rails=1, mbit_per_s=100.0) as network:
            seen.extend(present(network.prefix))
            raise error

    with pytest.raises(error):
        fail()
    assert len(seen) == 2
    assert not present(seen[0])


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


def test_without_root_or_programs_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert obstacle() == "user 1000, not root"
        with (
            pytest.raises(UnsupportedError, match="made by iproute2, as root"),
            rated_network(2, num_rails=1, mbit_per_s=1.0),
        ):
            pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert obstacle() == "no program ip or tc"


def test_a_kernel_that_refuses_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], lines: list[str] | None = None) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="Operation not permitted\n")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces, "_run", refuse)
    assert obstacle() == "ip: Operation not permitted"


@pytest.mark.parametrize(
    ("number", "rails", "rate"),
    [(0, 1, 1.0), (251, 1, 1.0), (1, 0, 1.0), (1, 10, 1.0), (1, 1, 0.0)],
)
def test_numbers_that_make_no_network_are_refused(number: int, rails: int, rate: float) -> None:
    refused = pytest.raises(ConfigError, match="out of range")
    with refused, contextlib.ExitStack() as stack:
        stack.enter_context(rated_network(number, num_rails=rails, mbit_per_s=rate))


@pytest.mark.parametrize("backend", ["gloo", "nccl", "fake"])
def test_an_interface_is_an_option_of_gloo_alone(backend: str) -> None:
    granted = grant(CommOptions(interface="lo"), backend, group="dp")
    assert granted.fields == ({"interface": "lo"} if backend == "gloo" else {})
    assert set(granted.refused) == (set() if backend == "gloo" else {"interface"})
