"""The place of a rank: what launchers say in the environment, and a store that comes late."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest

from pcomm.core.errors import ConfigError, PeerTimeoutError
from pcomm.core.process import RankPlace, this_host
from pcomm.core.process.store_server import open_store
from pcomm.core.testing.programs import PATIENCE_S, Programs, is_running, scaled_s

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1"}
JOB = {"JOB_COMPLETION_INDEX": "4"}
RAY = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "0"}


def place_in(environ: dict[str, str], **options: int) -> tuple[int, int]:
    found = RankPlace.from_environment("head:29500", environ=environ, **options)
    return found.rank, found.size


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        (TORCHRUN, {}, (2, 6)),
        (SLURM, {}, (3, 6)),
        ({**JOB, "PCOMM_RANKS": "6"}, {}, (4, 6)),
        (JOB, {"size": 5}, (4, 5)),
        (RAY, {}, (5, 6)),
        # The batch script of Slurm, or a container, gives torchrun's variables the same values.
        ({**SLURM, "RANK": "3", "WORLD_SIZE": "6"}, {}, (3, 6)),
        ({**JOB, "RANK": "4", "WORLD_SIZE": "6"}, {}, (4, 6)),
        # Of torchrun in a task of Slurm the inner one counts.
        ({**TORCHRUN, **SLURM, "SLURM_NTASKS": "3"}, {}, (2, 6)),
        # One that gives each rank an agent and a rendezvous of its own.
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, {"rank": 1, "size": 2}, (1, 2)),
        ({}, {"rank": 0, "size": 1}, (0, 1)),
        ({**SLURM, "SLURM_PROCID": "none"}, {"rank": 1, "size": 2}, (1, 2)),
        (SLURM, {"rank": 5}, (5, 6)),
    ],
)
def test_the_place_that_a_launcher_tells(environ, options, expected):
    assert place_in(environ, **options) == expected


def test_the_host_is_that_of_the_node_where_something_tells_it():
    assert this_host({}) == socket.gethostname()
    assert this_host({"SLURMD_NODENAME": "n1"}) == "n1"
    assert this_host({"SLURMD_NODENAME": "n1", "PCOMM_HOST": "rack-2"}) == "rack-2"
    for wrong in (" ", "rack 2"):
        with pytest.raises(ConfigError, match="PCOMM_HOST"):
            this_host({"PCOMM_HOST": wrong})


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({}, {}, r"none of RANK \(torchrun\), SLURM_PROCID \(Slurm\)"),
        ({}, {"size": 4}, "none of RANK"),
        (JOB, {}, "JOB_COMPLETION_INDEX 4, and no number of ranks"),
        ({"RANK": "1"}, {}, "no number of ranks"),
        ({}, {"rank": 1}, "no number of ranks"),
        # Two launchers at once.
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "6"}, {}, "RANK 0, SLURM_PROCID 3.* contradict"),
        ({**JOB, **SLURM}, {}, "contradict each other"),
        ({**SLURM, "RANK": "3", "WORLD_SIZE": "8"}, {}, "contradict each other"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {"size": 6}, "WORLD_SIZE 1.* contradict"),
        (SLURM, {"size": 4}, "contradict each other"),
        ({**JOB, "PCOMM_RANKS": "4"}, {}, "JOB_COMPLETION_INDEX 4, PCOMM_RANKS 4"),
        ({**TORCHRUN, "RANK": "6"}, {}, "RANK 6, WORLD_SIZE 6"),
        ({**TORCHRUN, "RANK": "-1"}, {}, "RANK -1"),
        ({}, {"rank": 4, "size": 4}, "--rank 4, --ranks 4"),
        ({**TORCHRUN, "RANK": "two"}, {}, "RANK='two'"),
        ({**JOB, "PCOMM_RANKS": "0"}, {}, "PCOMM_RANKS"),
    ],
)
def test_what_tells_no_place_is_refused(environ, options, message):
    with pytest.raises(ConfigError, match=message):
        place_in(environ, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head:29500", ("head", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
    ],
)
def test_an_address_of_a_store(text, expected):
    given = RankPlace.from_environment(text, environ=TORCHRUN)
    read = RankPlace.from_environment(environ={**TORCHRUN, "PCOMM_STORE": text})
    assert (given.host, given.port) == (read.host, read.port) == expected
    assert given.address == text


@pytest.mark.parametrize(
    "text", ["", "head", "head:", ":29500", "head:0", "head:65536", "fd00::1:29500", "head:-1"]
)
def test_what_is_no_address_of_a_store(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        RankPlace.from_environment(text, environ=TORCHRUN)
    with pytest.raises(ConfigError, match="PCOMM_STORE"):
        RankPlace.from_environment(environ={**TORCHRUN, "PCOMM_STORE": text})
    with pytest.raises(ConfigError, match="no address"):
        RankPlace.from_environment(environ=TORCHRUN)


def test_a_name_that_resolves_late_is_tried_again(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, asked, connect = server.getsockname()[1], [], socket.create_connection

        def resolves_late(address, **options):
            asked.append(address[0])
            if len(asked) < 4:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return connect(("127.0.0.1", address[1]), **options)

        monkeypatch.setattr(socket, "create_connection", resolves_late)
        RankPlace(0, 1, "head.late", port).wait_for_store(limit_s=scaled_s(PATIENCE_S))
    assert asked == ["head.late"] * 4


def test_a_store_that_is_not_there_is_told_after_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerTimeoutError, match=rf"127\.0\.0\.1:{port}.*refused.*0\.2 s"):
        RankPlace(3, 4, "127.0.0.1", port).wait_for_store(limit_s=0.2)
    with pytest.raises(PeerTimeoutError, match=r"no-such-host\.invalid"):
        RankPlace(3, 4, "no-such-host.invalid", port).wait_for_store(limit_s=0.2)


def test_connections_with_a_prefix_have_keys_of_their_own():
    server = open_store("127.0.0.1", 0)
    plain, other = (RankPlace(0, 1, "127.0.0.1", server.port, prefix=one) for one in ("", "two"))
    other.store().set("key", "theirs")
    assert not plain.store().check(["key"])
    assert plain.store().get("two/key") == b"theirs"


def test_a_store_listens_at_the_address_that_is_asked_for_alone():
    server = open_store("127.0.0.1", 0)
    # All of 127.0.0.0/8 is this machine.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port)).close()
    with pytest.raises(ConfigError, match="in use"):
        open_store("127.0.0.1", server.port)
    everywhere = open_store("0.0.0.0", 0)
    socket.create_connection(("127.0.0.2", everywhere.port)).close()
    with pytest.raises(ConfigError, match=r"a store at 192\.0\.2\.1:0"):
        open_store("192.0.2.1", 0)
    for port in (2**16, 2**16 + 29500, -1):
        with pytest.raises(ConfigError, match=f"{port} is no port"):
            open_store("127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_its_address_and_ends_by_a_signal(number: signal.Signals) -> None:
    with Programs() as programs:
        program = "from pcomm.core.cli import main; raise SystemExit(main())"
        process = programs.start(sys.executable, "-c", program, "store", "--port", 0)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.removeprefix("store at ").split(",")[0]
        place = RankPlace.from_environment(address, rank=0, size=1)
        # A rank that waits in it does not keep it.
        waits = threading.Thread(target=_wait_for_nothing, args=(place,))
        waits.start()
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        process.send_signal(number)
        _, told = process.communicate(timeout=scaled_s(PATIENCE_S))
        waits.join(scaled_s(PATIENCE_S))
    assert process.returncode == 0, told
    assert f"the store ends by {number.name}" in told
    assert not waits.is_alive()
    assert not [pid for pid in children if is_running(int(pid))]


def test_the_command_ends_with_the_process_that_started_it() -> None:
    program = "from pcomm.core.cli import main; raise SystemExit(main())"
    starts = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    store = [sys.executable, "-c", program, "store", "--port", 0, "--with-parent"]
    with Programs() as programs:
        parent = programs.start(sys.executable, "-c", starts, *store)
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("store at ")
        parent.kill()
        # The store has the other ends of the pipes: until it ends, this waits.
        _, told = parent.communicate(timeout=scaled_s(PATIENCE_S))
    assert parent.returncode == -signal.SIGKILL
    assert "the store ends by SIGTERM" in told


def _wait_for_nothing(place: RankPlace) -> None:
    with pytest.raises(Exception, match=r"[Cc]onnection|recv"):
        place.store(timeout_s=3600).get("nothing")


def test_the_environment_of_this_process_is_read_where_none_is_given(monkeypatch):
    for name in (*TORCHRUN, *SLURM, *JOB, "PCOMM_RANKS", "PCOMM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("PCOMM_STORE", "head:29500")
    assert RankPlace.from_environment() == RankPlace(1, 2, "head", 29500)
