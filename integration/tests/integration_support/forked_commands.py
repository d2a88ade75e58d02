"""Commands of `pcomm` in processes that need not import torch: forked from the server of ranks.

A fresh process takes three to five seconds of a processor to import what a command needs. Tests of
what is imported, of signals at the start and of orphans, and one of each command, start it as a
user does; the others may fork it.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from pcomm.core.cli import main
from pcomm.core.process.launch import fork_server, starting
from pcomm.core.process.signals import end_with_parent

__all__ = ["ForkedCommand"]


class ForkedCommand:
    """A command in a process of its own, with the part of `subprocess.Popen` that tests use.

    It leads a session, has the output, environment and signals of a fresh process, and ends with
    this process, even by SIGKILL. Its ranks come from the same server, and end with it.

    Args:
        words: The words of `pcomm`, such as `train`; or the path of a script of Python, and its
            words.
        env: Environment of the command.
        preload: Modules that the server imports if this is the first process that it starts.
        stdin: An open file for its input; None for an empty one.
        stdout: An open file for its output; None to keep it for `communicate`.
        stderr: An open file for its messages; None to keep them for `communicate`.

    Attributes:
        pid: Number of the process.
        stderr: Where `stderr` was None, its messages, to be read before `communicate`.
    """

    def __init__(
        self,
        *words: object,
        env: Mapping[str, str],
        preload: Sequence[str] = (),
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> None:
        context = fork_server(preload)
        theirs = []
        self._pipes: list[IO[str] | None] = []
        for given in (stdout, stderr):
            if given is None:
                ours, given = os.pipe()
                theirs.append(Connection(given, readable=False))
                self._pipes.append(open(ours))  # noqa: SIM115
            else:
                theirs.append(Connection(os.dup(_number(given)), readable=False))
                self._pipes.append(None)
        source = os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(_number(stdin))
        theirs.insert(0, Connection(source, writable=False))
        told = ([str(word) for word in words], dict(env), os.getcwd(), theirs)
        self._process = context.Process(target=_become, args=told, daemon=False)
        with starting(imports_main=False):
            self._process.start()
        for one in theirs:
            one.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stderr = self._pipes[1]

    @property
    def returncode(self) -> int | None:
        """Exit code, or the number of a signal below zero; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same as `returncode`. Local."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs. Local."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL. Local."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Local.

        Raises:
            subprocess.TimeoutExpired: It did not end within `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("pcomm", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written, once it has ended; see `wait`. Local."""
        found = ["", ""]

        def read(place: int, pipe: IO[str]) -> None:
            found[place] = pipe.read()

        # A pipe that nobody reads would stop it when it is full.
        given = [(place, pipe) for place, pipe in enumerate(self._pipes) if pipe is not None]
        readers = [threading.Thread(target=read, args=one, daemon=True) for one in given]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found[0], found[1]

    def close(self) -> None:
        """Kill it, with its session. Calling it again does nothing."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()


def _number(file: IO[Any] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def _become(words: list[str], env: dict[str, str], folder: str, files: list[Connection]) -> None:
    """Run the command in this process, which was forked for it."""
    os.setsid()
    end_with_parent()
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if words[0].endswith(".py"):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    sys.argv = ["pcomm", *words]
    code = main()
    sys.stdout.flush()
    sys.exit(code)
