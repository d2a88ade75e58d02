"""Joining a job: alone, as a local rank, and as a process that a launcher started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import pcomm.core.process.world
from core_bench.rated_network import RatedNetwork, obstacle, rated_network
from core_support.hosts import ADDRESS, on_host
from pcomm.core.errors import ConfigError, PcommError, PeerError
from pcomm.core.process.world import World, _wait_for_all_to_leave, connect
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S, Programs, free_port, scaled_s, wait_until

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# What every started process does: join, write what it sees to a file, and leave.
PROGRAM = """\
import json, os, sys
import torch
import torch.distributed as dist
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.topology import Topology
from pcomm.core.process.world import connect

with connect() as world:
    x = torch.tensor([1 << world.rank])
    with open_groups(Topology({"dp": world.size}), ["dp"]) as groups:
        total = int(groups["dp"].collectives.all_reduce(x))
    error = None
    if world.rank == 1:
        error = ConfigError("steps", found="0", why="None.", fix="Use 1.")
    try:
        world.fail_together("plan", error)
        told = ""
    except PcommError as problem:
        told = type(problem).__name__
    seen = {"rank": world.rank, "size": world.size, "device": str(world.device),
            "total": total, "told": told}
with open(os.path.join(os.environ["FOLDER"], str(seen["rank"])), "w") as file:
    json.dump(seen | {"connected_after": dist.is_initialized()}, file)
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher's variables, to set some of them."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, with `more`."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    # Without GPUs, which two processes could not share under NCCL.
    fixed = {"FOLDER": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**inherited, **fixed, **more}


def seen_by(folder: Path, rank: int) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads((folder / str(rank)).read_text())
    return found


def expected(rank: int) -> Mapping[str, object]:
    return {
        "rank": rank,
        "size": 2,
        "device": "cpu",
        "total": 3,
        "told": "ConfigError" if rank == 1 else "PeerError",
        "connected_after": False,
    }


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_alone_nothing_is_initialised(
    launcher: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    for name, value in variables.items():
        launcher.setenv(name, value)
    with connect() as world:
        assert (world.rank, world.size, world.store) == (0, 1, None)
        assert not dist.is_initialized()
        world.fail_together("plan", None)
        with pytest.raises(ConfigError, match="steps: 0"):
            world.fail_together("plan", ConfigError("steps", found="0", why="None.", fix="1."))


@ranks(3)
def test_within_local_ranks_their_world_is_used_and_left_open(rank: int) -> None:
    with connect() as world:
        assert (world.rank, world.size) == (rank, 3)
        assert world.device == torch.device("cpu")
        assert world.store is not None
        world.store.set(f"key {rank}", "value")
        assert world.store.get(f"key {(rank + 1) % 3}") == b"value"
    assert dist.is_initialized()
    with connect() as again:
        assert (again.rank, again.size) == (world.rank, world.size)


@ranks(2)
def test_the_world_fails_together(rank: int) -> None:
    error = ConfigError("steps", found="0", why="None.", fix="Use 1.") if rank == 0 else None
    with connect() as world:
        with pytest.raises(PcommError) as caught:
            world.fail_together("plan", error)
        assert type(caught.value) is (ConfigError if rank == 0 else PeerError)
        world.fail_together("plan", None)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "0"}, "WORLD_SIZE not set: RANK=0"),
        ({"WORLD_SIZE": "2"}, "RANK not set: WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
            "MASTER_PORT='x'",
        ),
    ],
    ids=str,
)
def test_variables_that_make_no_sense_are_refused(
    launcher: pytest.MonkeyPatch, variables: Mapping[str, str], words: str
) -> None:
    for name, value in variables.items():
        launcher.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as caught, connect():
        pass
    assert "torchrun" in caught.value.fix
    assert not dist.is_initialized()


class StoreThatTells:
    """A store that tells when a wait begins."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.waits = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, *arguments: Any) -> None:
        self.waits.set()
        self._store.wait(*arguments)


def test_rank_0_leaves_last_because_the_store_may_live_in_it(
    launcher: pytest.MonkeyPatch,
) -> None:
    store = StoreThatTells(dist.HashStore())
    cpu = torch.device("cpu")
    worlds = [World(rank, 3, cpu, cast(dist.Store, store)) for rank in range(3)]
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in place.items():
        launcher.setenv(name, value)
    launcher.setattr(pcomm.core.process.world, "_init_process_group", lambda *_, **__: None)
    launcher.setattr(pcomm.core.process.world, "_joined", lambda *_, **__: worlds[0])

    def join_and_leave() -> None:
        with connect():
            pass

    with ThreadPoolExecutor() as pool:
        left = pool.submit(join_and_leave)
        # Either it begins to wait, or it has left: no clock decides.
        left.add_done_callback(lambda _: store.waits.set())
        store.waits.wait()
        assert not left.done()
        _wait_for_all_to_leave(worlds[1])
        assert not store.check(["pcomm/all left"])
        _wait_for_all_to_leave(worlds[2])
        left.result()


def test_a_port_that_another_job_has_is_named(launcher: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
            launcher.setenv(name, str(value))
        launcher.setenv("MASTER_ADDR", "127.0.0.1")
        message = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: the port is in use"
        with pytest.raises(ConfigError, match=message) as caught, connect():
            pass
    assert "--standalone" in caught.value.fix
    assert not dist.is_initialized()


@pytest.fixture
def port() -> int:
    return free_port()


@ranks(2)
def test_a_launchers_variables_join_two_processes(rank: int, tmp_path: Path, port: int) -> None:
    dist.destroy_process_group()
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict(os.environ, environment(tmp_path, **place), clear=True),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        exec(PROGRAM, {})
    assert seen_by(tmp_path, rank) == expected(rank)


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """Torchrun sets what it does at each of them, and leaves it so."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_signals")
def test_torchrun_joins_two_processes(launcher: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its agent and its rendezvous, within this process; its workers are forked by a server."""
    own = {"FOLDER": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    standalone = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="forkserver"
    )
    # The server has the environment of its own start.
    elastic_launch(standalone, exec)(f"import os\nos.environ |= {own}\n{PROGRAM}", {})
    assert [seen_by(tmp_path, rank) for rank in range(2)] == [expected(0), expected(1)]


class TwoHosts:
    """Rank 0 and rank 1 on hosts of their own, whose names resolve to 127.0.1.1."""

    def __init__(self, folder: Path, network: RatedNetwork, programs: Programs) -> None:
        self.folder, self.network, self.programs = folder, network, programs

    def start(self, rank: int, *words: object, **more: str) -> subprocess.Popen[str]:
        """`words` as that rank. The address of rank 0 is the same on both."""
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": "29512", "LOCAL_RANK": "0"}
        env = {**environment(self.folder), "GLOO_SOCKET_IFNAME": "", **place, **more}
        env = {name: value for name, value in env.items() if name != "GLOO_SOCKET_IFNAME" or value}
        host = on_host(self.network, rank, self.folder)
        return self.programs.start(*host, *words, env=env)


@pytest.fixture
def hosts(tmp_path: Path, programs: Programs) -> Iterator[TwoHosts]:
    if reason := obstacle():
        pytest.skip(f"no hosts of their own here: {reason}")
    with rated_network(2, num_rails=1, mbit_per_s=1000.0) as network:
        yield TwoHosts(tmp_path, network, programs)


REFUSED = """\
import os
from pcomm.core.errors import ConfigError
from pcomm.core.process.world import connect

try:
    with connect():
        pass
except ConfigError as problem:
    print(problem)
# And again, as it would by itself.
del os.environ["GLOO_SOCKET_IFNAME"]
os.environ["MASTER_PORT"] = "29513"
"""


def test_hosts_whose_names_are_loopback_meet_by_the_route_to_rank_0(hosts: TwoHosts) -> None:
    """What the user has chosen is not replaced: an error on both hosts names it."""
    program = hosts.folder / "program.py"
    program.write_text(REFUSED + PROGRAM)
    started = [
        hosts.start(rank, sys.executable, program, GLOO_SOCKET_IFNAME="lo") for rank in range(2)
    ]
    for process in started:
        printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
        assert process.returncode == 0, logged
        assert printed.startswith("connect: MASTER_ADDR=10.77.0.1, MASTER_PORT=29512: rank")
        assert "by the interface 'lo'." in printed
        assert "Set GLOO_SOCKET_IFNAME on each host" in printed
    assert [seen_by(hosts.folder, rank) for rank in range(2)] == [expected(0), expected(1)]


WAITING = """\
import os, signal, sys
from pcomm.core.process import world

for rank, port in enumerate(sys.argv[1:]):
    pid = os.fork()
    if not pid:
        os.environ |= {"RANK": str(rank), "MASTER_PORT": port}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        with world.connect():
            pass
        sys.exit("connected")
    print(pid, flush=True)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)])
"""


def test_a_rank_that_waits_for_others_hears_a_request_to_stop(
    tmp_path: Path, programs: Programs
) -> None:
    """Rank 0 waits for the other one to come, rank 1 for an answer from where rank 0 should be."""
    path = tmp_path / "waiting.py"
    path.write_text(WAITING)
    env = environment(tmp_path, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as taken:
        own = free_port()
        process = programs.start(sys.executable, path, own, silent.getsockname()[1], env=env)
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        taken.enter_context(silent.accept()[0])
        wait_until(lambda: is_listening(own), "the store of rank 0")
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        printed, told = process.communicate(timeout=scaled_s(PATIENCE_S))
        assert printed == "[7, 7]\n", told


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
