"""Time from `kill -9` of a replica group of torchft to the next committed step, and lost samples.

    python3 -m venv torchft
    torchft/bin/python -m pip install -c constraints.txt torchft-nightly==2026.10.26
    python packages/pcomm-ntp/benchmarks/torchft/beside_torchft.py torchft/bin/python \\
        --csv docs/benchmarks/torchft.csv

`--lose replica` kills all processes of one of two replicas instead, first those of torchft and then
those of pcomm, and `--lose host` takes the link of its host down, which needs root. Their rows have
names of their own.

Replica groups of one process each, which is torchft's best case: a group of several has to be
started again as a whole. They train the model of `pcomm bench ntp --parts recovery` with the same
global batch over gloo. One is killed at a random moment; once the others have gone on, a process
takes its place and heals, and the next is killed. torchft 0.2.0 does not get that far over gloo:
the first kill ends every other process with an AssertionError in `torchft/ddp.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[3] / "pcomm-core" / "benchmarks"))

from core_bench.rated_network import RatedNetwork, rated_network
from core_bench.rows import Row, row, save_rows
from core_bench.tables import lines_of

# The folder above is no part of a package.
sys.path.append(str(Path(__file__).parents[1]))
from ntp_bench.kills import (
    REPLICA_SETTINGS,
    Kill,
    RecoveryCost,
    TimedAttempt,
    is_whole,
    kill_ranks,
    kill_rows,
    read_attempts,
    recovery_of,
)
from ntp_bench.lost_hosts import lose_hosts, lost_host_rows
from ntp_bench.small_model import LAYERS, ROWS, WIDTH

_T = TypeVar("_T")
_REPLICA = Path(__file__).with_name("replica.py")
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Limits:
    """Time limits of a job, in seconds, under the names that torchft has for them."""

    name: str
    heartbeat_interval: float
    heartbeat_timeout: float
    join_timeout: float
    quorum_tick: float
    timeout: float
    collective_timeout: float


# The command of torchft's README and the numbers of its example train_ddp.py; then the shortest
# with which no replica group was taken for dead that was not, on two cores that all share.
_LIMITS = (
    Limits("as in its README", 0.1, 5.0, 10.0, 0.1, 30.0, 5.0),
    Limits("shortest", 0.02, 0.3, 0.3, 0.01, 5.0, 1.0),
)


class Job:
    """A lighthouse and replica groups, as processes; a context manager.

    Args:
        python: Python that torchft is installed for.
        limits: Time limits.
        replicas: Number of replica groups.
        folder: Empty folder for what the processes write.
        network: Hosts of the groups, and one of the lighthouse; None for this one.
    """

    def __init__(
        self,
        python: Path,
        limits: Limits,
        replicas: int,
        folder: Path,
        network: RatedNetwork | None = None,
    ) -> None:
        self._python, self._limits, self._folder = python, limits, folder
        self._replicas, self._network = replicas, network
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self._port = probe.getsockname()[1]
        command = [
            *self._on_host(replicas),
            str(python.with_name("torchft_lighthouse")),
            *("--bind", f"[::]:{self._port}", "--min_replicas", "1"),
            *("--quorum_tick_ms", _milliseconds(limits.quorum_tick)),
            *("--join_timeout_ms", _milliseconds(limits.join_timeout)),
            *("--heartbeat_timeout_ms", _milliseconds(limits.heartbeat_timeout)),
        ]
        self._starts = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, Path] = {}
        with (folder / "lighthouse.log").open("wb") as log:
            self._lighthouse = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Job:
        try:
            for replica in range(self._replicas):
                self.start(replica)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._processes.values(), self._lighthouse]:
            process.kill()
            process.wait()

    def start(self, replica: int) -> None:
        """Start the process of a replica group."""
        self._starts += 1
        output = self._folder / f"{replica}-{self._starts}.txt"
        limits = self._limits
        command = [
            *self._on_host(replica),
            *(str(self._python), str(_REPLICA), "--replica", str(replica)),
            *("--host", self._address(replica)),
            *("--lighthouse", f"http://{self._address(self._replicas)}:{self._port}"),
            *("--timeout", str(limits.timeout)),
            *("--collective-timeout", str(limits.collective_timeout)),
            *("--heartbeat", str(limits.heartbeat_interval)),
            *("--rows", str(ROWS // self._replicas)),
            *("--width", str(WIDTH), "--layers", str(LAYERS)),
        ]
        with output.open("wb") as file, output.with_suffix(".log").open("wb") as log:
            self._processes[replica] = subprocess.Popen(
                command, stdout=file, stderr=log, env=self._environment()
            )
        self._outputs[replica] = output

    def attempts(self) -> dict[int, list[TimedAttempt]]:
        """The attempts of the present process of each replica group."""
        return {replica: read_attempts(path) for replica, path in self._outputs.items()}

    def wait_for_all(self, commits: int) -> None:
        """Wait until the last attempts of each replica group were commits of all groups."""
        self._wait_for(
            lambda: (
                is_whole(self.attempts().values(), members=self._replicas, commits=commits) or None
            ),
            "steps of all replica groups",
        )

    def lose(self, replica: int) -> RecoveryCost:
        """Lose a replica group, wait until the others have committed a step, and start it again."""
        killed_at_s = time.monotonic()
        if self._network is None:
            self._kill(replica)
        else:
            self._link(replica, "down")
        found = self._wait_for(
            lambda: recovery_of(
                self.attempts(),
                killed_at_s=killed_at_s,
                victims=[replica],
                members=self._replicas - 1,
            ),
            "a step without the one that is gone",
            spared=replica,
        )
        if self._network is not None:
            self._kill(replica)
            self._link(replica, "up")
        self.start(replica)
        return found

    def _kill(self, replica: int) -> None:
        self._processes[replica].send_signal(signal.SIGKILL)
        self._processes[replica].wait()

    def _link(self, replica: int, state: str) -> None:
        assert self._network is not None
        self._network.change(replica, f"link set {self._network.interfaces[0]} {state}")

    def _on_host(self, number: int) -> list[str]:
        """Words before a command that run it on a host."""
        if self._network is None:
            return []
        # With a name of its own, since torchft tells others the name of its host.
        return ["ip", "netns", "exec", self._network.namespaces[number], "unshare", "--uts"]

    def _address(self, number: int) -> str:
        return "localhost" if self._network is None else f"10.77.0.{number + 1}"

    def _environment(self) -> dict[str, str]:
        if self._network is None:
            return dict(os.environ)
        return {**os.environ, "GLOO_SOCKET_IFNAME": self._network.interfaces[0]}

    def _wait_for(
        self, answer: Callable[[], _T | None], what: str, spared: int | None = None
    ) -> _T:
        end = time.monotonic() + _PATIENCE_S
        while (found := answer()) is None:
            ended = [
                replica
                for replica, process in self._processes.items()
                if replica != spared and process.poll() is not None
            ]
            if ended or time.monotonic() > end:
                log = self._outputs[ended[0] if ended else 0].with_suffix(".log")
                sys.exit(f"no {what}; ended: {ended}\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        return found


def measure(
    python: Path, limits: Limits, *, replicas: int, kills: int, are_hosts: bool = False
) -> list[RecoveryCost]:
    """The recoveries of `kills` kills, or losses of hosts, one after another."""
    chance, found = random.Random(0), []
    with ExitStack() as stack:
        network = None
        if are_hosts:
            made = rated_network(replicas + 1, num_rails=1, mbit_per_s=1000.0)
            network = stack.enter_context(made)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = stack.enter_context(Job(python, limits, replicas, folder, network))
        for _ in range(kills):
            job.wait_for_all(commits=10)
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.randrange(replicas)
            found.append(job.lose(victim))
            print(f"{limits.name}: {found[-1].seconds:.2f} s", flush=True)
    return found


def rows_of(
    limits: Limits, found: Sequence[RecoveryCost], replicas: int, benchmark: str
) -> list[Row]:
    """Seconds, and samples, of the kills with one set of limits."""
    place = f"torchft, {limits.name} @ {replicas} replica groups"
    seconds = [one.seconds for one in found]
    number = ROWS // replicas
    # The killed process had drawn a batch, too, which its successor does not draw again.
    lost = [(one.repeated + 1) * number for one in found]
    values = {
        "s, median": statistics.median(seconds),
        "s, longest": max(seconds),
        "samples drawn and not trained on, median": float(statistics.median(lost)),
        "samples fewer in each step until a process replaces it": float(number),
    }
    return [row(benchmark, place, value, unit, len(found)) for unit, value in values.items()]


def main() -> None:
    """Measure, print and save the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path, help="the Python that torchft is installed for")
    parser.add_argument("--lose", choices=("process", "replica", "host"), default="process")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    # Rows tell the command, and name no place of this machine.
    sys.argv = ["TORCHFT_PYTHON" if one == str(arguments.python) else one for one in sys.argv]
    python, kills, lost = arguments.python.absolute(), arguments.kills, arguments.lose
    # Beside pcomm with two replicas; in rows of pcomm's own run it has 8 ranks.
    replicas = 4 if lost == "process" else 2
    benchmark = "torchft" if lost == "process" else f"torchft lost {lost}"
    rows: list[Row] = []
    for limits in _LIMITS:
        found = measure(python, limits, replicas=replicas, kills=kills, are_hosts=lost == "host")
        rows += rows_of(limits, found, replicas, benchmark)
    if lost == "replica":
        for tp, signs in REPLICA_SETTINGS:
            killed = kill_ranks(tp, kills, signs, is_replica=True, tell=_tell)
            rows += kill_rows(killed, f"pcomm, 2 x TP{tp}, {signs.words}", benchmark)
    elif lost == "host":
        rows += lost_host_rows(lose_hosts(kills, tell=_tell), benchmark)
    print("\n".join(lines_of(rows)))
    if arguments.csv is not None:
        save_rows(arguments.csv, rows)


def _tell(kill: Kill) -> None:
    print(f"pcomm: {kill.recovery.seconds:.2f} s", flush=True)


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


if __name__ == "__main__":
    main()
