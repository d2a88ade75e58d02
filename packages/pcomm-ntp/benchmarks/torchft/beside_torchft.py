"""Time from `kill -9` of a replica group of torchft to the next committed step, and lost samples.

    python3 -m venv torchft
    torchft/bin/python -m pip install -c constraints.txt torchft-nightly==2026.10.26
    python packages/pcomm-ntp/benchmarks/torchft/beside_torchft.py torchft/bin/python \\
        --csv docs/benchmarks/torchft.csv

Replica groups of one process each, which is torchft's best case: a group of several has to be
started again as a whole. They train the model of `pcomm bench ntp --parts recovery` with the same
global batch over gloo. One is killed at a random moment; once the others have gone on, a process
takes its place and heals, and the next is killed. torchft 0.2.0 does not get that far over gloo:
the first kill ends every other process with an AssertionError in `torchft/ddp.py`.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[3] / "pcomm-core" / "benchmarks"))

from core_bench.runner import Row, lines_of, row, save_rows

# The folder above is no part of a package.
sys.path.append(str(Path(__file__).parents[1]))
from ntp_bench.kills import RecoveryCost, TimedAttempt, is_whole, read_attempts, recovery_of
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
    """A lighthouse and replica groups, as processes; a context manager."""

    def __init__(self, python: Path, limits: Limits, replicas: int, folder: Path) -> None:
        self._python, self._limits, self._folder = python, limits, folder
        self._replicas = replicas
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self._port = probe.getsockname()[1]
        command = [
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
            *(str(self._python), str(_REPLICA), "--replica", str(replica)),
            *("--lighthouse", f"http://localhost:{self._port}"),
            *("--timeout", str(limits.timeout)),
            *("--collective-timeout", str(limits.collective_timeout)),
            *("--heartbeat", str(limits.heartbeat_interval)),
            *("--rows", str(ROWS // self._replicas)),
            *("--width", str(WIDTH), "--layers", str(LAYERS)),
        ]
        with output.open("wb") as file, output.with_suffix(".log").open("wb") as log:
            self._processes[replica] = subprocess.Popen(command, stdout=file, stderr=log)
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

    def kill(self, replica: int) -> RecoveryCost:
        """Kill the process of a replica group and wait until the others have committed a step."""
        killed_at_s = time.monotonic()
        self._processes[replica].send_signal(signal.SIGKILL)
        self._processes[replica].wait()
        return self._wait_for(
            lambda: recovery_of(
                self.attempts(), killed_at_s=killed_at_s, victim=replica, members=self._replicas - 1
            ),
            "a step without the killed one",
            spared=replica,
        )

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


def measure(python: Path, limits: Limits, *, replicas: int, kills: int) -> list[RecoveryCost]:
    """The recoveries of `kills` kills, one after another."""
    chance, found = random.Random(0), []
    with (
        tempfile.TemporaryDirectory() as folder,
        Job(python, limits, replicas, Path(folder)) as job,
    ):
        for _ in range(kills):
            job.wait_for_all(commits=10)
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.randrange(replicas)
            found.append(job.kill(victim))
            print(f"{limits.name}: {found[-1].seconds:.2f} s", flush=True)
            job.start(victim)
    return found


def rows_of(limits: Limits, found: Sequence[RecoveryCost], replicas: int) -> list[Row]:
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
    return [row("torchft", place, value, unit, len(found)) for unit, value in values.items()]


def main() -> None:
    """Measure, print and save the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path, help="the Python that torchft is installed for")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for limits in _LIMITS:
        found = measure(
            arguments.python.absolute(), limits, replicas=arguments.replicas, kills=arguments.kills
        )
        rows += rows_of(limits, found, arguments.replicas)
    print("\n".join(lines_of(rows)))
    if arguments.csv is not None:
        save_rows(arguments.csv, rows)


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


if __name__ == "__main__":
    main()
