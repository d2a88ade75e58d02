"""Programs that a test starts and that end with it, and how long a test waits for anything."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pcomm.core import environment
from pcomm.core.testing.end_marked import end_marked, marked

__all__ = [
    "LONGEST_S",
    "PATIENCE_S",
    "Finished",
    "Programs",
    "free_port",
    "is_running",
    "load_factor",
    "rank_limit_s",
    "scaled_s",
    "wait_until",
]


Finished = subprocess.CompletedProcess[str]
"""What `Programs.run` returns: `returncode`, `stdout` and `stderr`."""


class Programs:
    """Starts programs, and ends them with all their descendants; a context manager.

    They end with `stop`, with the context, and when this process ends, even by SIGKILL: a small
    process, which outlives this one for that, watches it.
    """

    def __init__(self) -> None:
        # A name of its own, so that a test which starts tests leaves its mark on theirs, too.
        self._name = f"TEST_PROGRAMS_{uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[str]] = []
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(
        self, *words: object, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A program in a session of its own, with pipes for what it prints. Local.

        Args:
            words: The command line.
            env: Environment of the program; that of this process if absent.
            options: Options of `subprocess.Popen`, which replace ours.
        """
        self._watch()
        ours: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
            "preexec_fn": _hear_interrupts,
        }
        process = subprocess.Popen(
            [str(word) for word in words],
            text=True,
            env={**(os.environ if env is None else env), self._name: "1"},
            **{**ours, **options},
        )
        self._started.append(process)
        return process

    def run(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        within_s: float | None = None,
        **options: Any,
    ) -> Finished:
        """Start a program, wait for its end, and return what it printed. Local.

        Args:
            words: The command line.
            env: Environment of the program; that of this process if absent.
            within_s: Time limit in seconds; by default `PATIENCE_S`, scaled.
            options: Options of `subprocess.Popen`.

        Raises:
            subprocess.TimeoutExpired: It did not end. It, and all that it started, is ended then.
        """
        process = self.start(*words, env=env, **options)
        try:
            limit_s = scaled_s(PATIENCE_S) if within_s is None else within_s
            printed, logged = process.communicate(timeout=limit_s)
        except BaseException:
            self.stop()
            raise
        command = [str(word) for word in words]
        return subprocess.CompletedProcess(command, process.returncode, printed, logged)

    def running(self) -> list[int]:
        """The ids of the processes that were started, and of their descendants. Local."""
        return marked(self._mark)

    def stop(self) -> None:
        """Kill all that was started and still runs, with all descendants. Local."""
        for process in self._started:
            # Without /proc the mark is not found, and this ends the program at least.
            if process.poll() is None:
                process.kill()
        end_marked(self._mark)
        for process in self._started:
            # No process holds the other ends of its pipes any more.
            process.communicate()
        self._started.clear()

    def close(self) -> None:
        """`stop`, and end the watcher. Calling it again does nothing."""
        self.stop()
        if self._watcher is not None:
            self._watcher.communicate()
            self._watcher = None

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _mark(self) -> str:
        return f"{self._name}=1"

    def _watch(self) -> None:
        if self._watcher is None:
            program = Path(__file__).with_name("end_marked.py")
            # In a session of its own: a Ctrl-C that ends this process must not end it before.
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), self._mark],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )


def _hear_interrupts() -> None:
    """Undo what a shell does to a job in the background: it ignores Ctrl-C, with all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_running(pid: int) -> bool:
    """Whether a thread of a process runs, so that its files and their locks may be open. Local.

    The first thread may have ended before the others, and a process for which no parent waits is
    a zombie. Linux alone.
    """
    tasks = Path(f"/proc/{pid}/task")
    # The process, or a thread of it, may end while it is looked at.
    with suppress(FileNotFoundError, ProcessLookupError):
        return any(_is_thread_running(tasks / thread / "stat") for thread in os.listdir(tasks))
    return False


def _is_thread_running(stat: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


PATIENCE_S = 120.0
"""How long a test waits for what is sure to happen, on a machine with nothing else to do."""
LONGEST_S = 480.0
"""What no time limit of a test exceeds by itself; the limit of pytest-timeout lies above it."""


def load_factor() -> float:
    """How many threads want each core, at least 1: so much slower is everything. Local."""
    try:
        waiting = os.getloadavg()[0]
    except OSError:
        return 1.0
    return max(1.0, waiting / (os.cpu_count() or 1))


def scaled_s(quiet_s: float) -> float:
    """A time limit in seconds, for now.

    Args:
        quiet_s: The limit on a machine with nothing else to do, in seconds. A limit above
            `LONGEST_S` is not scaled.
    """
    return max(quiet_s, min(LONGEST_S, quiet_s * load_factor()))


def rank_limit_s() -> float:
    """The limit of one test on ranks: `PCOMM_RANKS_TIMEOUT_S`, scaled."""
    return scaled_s(environment.ranks_timeout_s())


def wait_until(claim: Callable[[], object], what: str, *, within_s: float | None = None) -> None:
    """Return as soon as `claim()` is true; look often. Local.

    Args:
        claim: A cheap condition that becomes true at some time.
        what: Description of the condition, for the message.
        within_s: Time limit in seconds; by default `PATIENCE_S`, scaled.

    Raises:
        AssertionError: It did not become true.
    """
    limit_s = scaled_s(PATIENCE_S) if within_s is None else within_s
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.01)


# Below the ports that systems give to connections and to listeners that ask for any: what a test
# beside takes meanwhile is never one of these.
_PORTS = range(12_000, 32_000)


def free_port() -> int:
    """A TCP port that is free, and that only a program which names it will take. Local."""
    # Tests seed the usual generator, and then processes would draw the same ports.
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
