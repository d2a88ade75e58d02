"""Ranks on this machine that may die and come back, while the others go on.

The launcher has a store, starts the processes, and writes into the store which of them ended. It
restarts nothing by itself, and takes part in no collective.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pcomm.core.process.launch import (
    REQUESTS,
    RankError,
    TaskReport,
    as_rank,
    failure_report,
    fork_server,
    next_wait_s,
    start_rank,
    starting,
)
from pcomm.core.process.process_watch import ProcessWatch, RankReport, WatchedProcess
from pcomm.core.process.rank_place import RankPlace
from pcomm.core.process.signals import stacks_of
from pcomm.core.process.store_server import open_store

__all__ = ["RankReport", "ResilientRanks"]


_HOST = "127.0.0.1"


class ResilientRanks:
    """A store, and processes of this machine that run one task each as ranks of one job.

    A context manager. Processes are forked from a server that has imported torch. No process group
    is made for them: they meet in the store, for example by a `Control`.

    Each end of a process is told in the store: `store.add("pcomm/ended/count", 0)` is the number of
    ends, and `store.get(f"pcomm/ended/{n}")`, for n from 1, is the text
    `"{rank} {incarnation} {reason}"`. The reason is `finished` for a task that returned,
    `failed: ...` for one that raised, or how the process ended, such as `killed by SIGKILL`.

    Ctrl-C while `wait` waits is passed on to the ranks, which may have something to save; a second
    one is raised. The ranks end when this process does, however that ends.

    Attributes:
        size: Number of ranks.
        port: Port of the store on this host.

    Args:
        size: Number of ranks.
        threads: Threads that torch uses in each rank.
        preload: Modules that the server imports before it forks, as for `LocalRanks`.
        imports_main: False for tasks that are not defined in the program's own file, as for
            `LocalRanks`.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 1,
        preload: Sequence[str] = (),
        imports_main: bool = True,
    ) -> None:
        self.size = size
        self._threads, self._imports_main = threads, imports_main
        self._context = fork_server(preload)
        self._call: tuple[Callable[..., Any], tuple[object, ...]] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pcomm-ranks-")
        self._server: dist.TCPStore | None = open_store(_HOST, 0)
        self.port: int = self._server.port
        self._watch = ProcessWatch(self.place(0).store())
        self._end = util.Finalize(self, _end, args=(self._watch, self._folder), exitpriority=0)

    def place(self, rank: int) -> RankPlace:
        """The place of a rank; its `store()` connects to the store of these ranks. Local."""
        return RankPlace(rank, self.size, _HOST, self.port)

    def start(self, task: Callable[..., Any], args: Sequence[object] = ()) -> None:
        """Start a process for each rank, which calls `task(place, *args)` with its `RankPlace`.

        Args:
            task: Anything that pickles, such as a function at the top of a module.
            args: The same further arguments for every rank.

        Raises:
            RankError: They were started before, or closed.
        """
        if self._call is not None:
            raise RankError("These ranks were started; for a rank that ended call join_again.")
        self._call = task, tuple(args)
        for rank in range(self.size):
            self._start(rank, 0, self._call)

    def join_again(self, rank: int, args: Sequence[object] | None = None) -> None:
        """Start a new process for a rank whose process has ended; it calls the same task.

        Args:
            rank: Rank of the new process.
            args: Further arguments of the function; by default those of `start`.

        Raises:
            RankError: The rank's process has not ended, or there was none.
        """
        reports = self._watch.reports(0.0, [rank])
        if self._call is None or rank not in reports:
            raise RankError(f"The process of rank {rank} has not ended; wait([{rank}]) first.")
        task, first = self._call
        call = task, first if args is None else tuple(args)
        self._start(rank, reports[rank].incarnation + 1, call)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a rank; nothing happens if that has ended. Local."""
        self._watch.send_signal(rank, number)

    def wait(
        self, ranks: Sequence[int] | None = None, *, timeout_s: float | None = None
    ) -> dict[int, RankReport]:
        """Wait until the processes of `ranks` have ended; what each of them reports, by rank.

        Args:
            ranks: Ranks to wait for; by default all.
            timeout_s: Seconds to wait; None waits for ever.

        Raises:
            RankError: Some are running after `timeout_s` seconds; it has their stacks, and they
                go on.
            KeyboardInterrupt: A second one; the first is passed on to the ranks.
        """
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_interrupted = False
        while True:
            try:
                reports = self._watch.reports(next_wait_s(deadline), chosen)
                running = [rank for rank in chosen if rank not in reports]
                if not running:
                    return {rank: reports[rank] for rank in chosen}
                if deadline is not None and time.monotonic() >= deadline:
                    raise RankError(self._told(running, reports))
            except KeyboardInterrupt:
                if is_interrupted:
                    raise
                is_interrupted = True
                for rank in chosen:
                    self.kill(rank, signal.SIGINT)

    def close(self) -> None:
        """Kill the processes that are left, and end the store. Calling it again does nothing."""
        self._end()
        self._server = None

    def __enter__(self) -> ResilientRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how it is done ------------------------------------------------------------------

    def _start(
        self, rank: int, incarnation: int, call: tuple[Callable[..., Any], tuple[object, ...]]
    ) -> None:
        if self._server is None:
            raise RankError("These ranks were closed; make new ones.")
        place = RankPlace(rank, self.size, _HOST, self.port, incarnation)
        stacks, name = str(self._stacks(rank, incarnation)), f"rank {rank} of {self.size}"
        given = place, pickle.dumps(call), self._threads, stacks, self._imports_main
        with starting(imports_main=self._imports_main):
            process, ours = start_rank(self._context, name, run_once, *given, duplex=False)
        self._watch.add(rank, WatchedProcess(incarnation, process, ours))

    def _stacks(self, rank: int, incarnation: int) -> Path:
        return Path(self._folder.name, f"stacks-{rank}-{incarnation}")

    def _told(self, running: Sequence[int], reports: dict[int, RankReport]) -> str:
        """Why the ranks that run are waited for, and what became of the others."""
        lines = [f"ranks {list(running)} of {self.size} did not finish in time"]
        for rank in range(self.size):
            found = self._watch.running(rank)
            if rank in reports:
                lines.append(f"rank {rank}: {reports[rank].reason}\n{reports[rank].traceback}")
            elif found is not None:
                incarnation, pid = found
                stacks = stacks_of(pid, self._stacks(rank, incarnation))
                lines.append(f"rank {rank}: still running at\n{stacks}")
        return "\n".join(lines)


def _end(watch: ProcessWatch, folder: tempfile.TemporaryDirectory[str]) -> None:
    watch.close()
    folder.cleanup()


def run_once(
    caller: Connection, place: RankPlace, call: bytes, threads: int, stacks: str, has_main: bool
) -> None:
    """Run one task and send its report.

    Args:
        caller: Connection to which the report goes.
        place: First argument of the task.
        call: The function and its other arguments, pickled.
        threads: Number of threads that torch uses.
        stacks: File for the stacks that SIGUSR1 asks for.
        has_main: True if this process has run the program's own file.
    """
    with as_rank(threads, stacks, has_main=has_main):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
            function, args = pickle.loads(call)
            # By value: the connection's own pickling would hand tensors over as open files.
            report = TaskReport(None, pickle.dumps(function(place, *args)))
        except BaseException as error:  # told in the report
            report = failure_report(error, time.monotonic())
        finally:
            # One that comes now must not end the process before its report is sent.
            signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        with (
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
            open(caller.fileno(), "wb", closefd=False) as pipe,
        ):
            pickle.dump(report, pipe)
