"""Programs that a test starts, and that end with it: whole trees, whatever happens to the test.

A launcher such as torchrun puts its workers into sessions of their own, where no signal to the
launcher's group reaches them, and workers hold the pipes that the test reads: without the launcher
they train on and the test waits for ever. So every program carries a mark in its environment, which
all its descendants inherit, and what carries the mark is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pcomm.core.testing.end_marked import end_marked, marked
from pcomm.core.testing.patience import PATIENCE_S, scaled_s

__all__ = ["Finished", "Programs", "is_running"]

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
            env: Its environment; that of this process if absent.
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
            env: Its environment; that of this process if absent.
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


def _hear_interrupts() -> None:
    """Undo what a shell does to a job in the background: it ignores Ctrl-C, with all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
