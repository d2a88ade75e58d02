"""Ranks on this machine: processes that start fast, run tasks together and fail clearly.

Starting Python and importing torch takes seconds, so processes are forked from a server that
has imported torch already. Each task gets a default process group of its own over a file store,
without ports. The first rank to fail decides what the caller sees; a rank that hangs is asked
for the stacks of its threads before it is stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pcomm.core.errors import PcommError
from pcomm.core.process.fork_server import fork_server, starting
from pcomm.core.process.rank_error import RankError, end_of
from pcomm.core.process.rank_process import REQUESTS, Report, Task, serve
from pcomm.core.process.rank_session import RankSession
from pcomm.core.process.stacks import stacks_of

__all__ = ["LocalRanks", "RankError", "run_local"]

# How long the other ranks may take to finish by themselves once one has failed.
_GRACE_S = 2.0
# A signal that arrives right before a wait begins is acted on when the wait ends, so none is long.
_LONGEST_WAIT_S = 1.0


class LocalRanks:
    """`size` processes that run one task after another, each time as ranks of a fresh world.

    A context manager. After a failure the processes are stopped and cannot be used again.

    Args:
        size: Number of ranks.
        threads: Threads that torch uses in each rank.
        preload: Modules that the server imports before it forks, so that ranks need not; beside
            them it imports those of pcomm that this process has imported. They count for the first
            ranks of a process, which start its server.
        imports_main: False for tasks that are not defined in the program's own file. Ranks do not
            run it then, so that it may start them outside of `if __name__ == "__main__":`.
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
        self.is_usable = True
        self._folder = tempfile.TemporaryDirectory(prefix="pcomm-ranks-")
        self._tasks = 0
        context = fork_server(preload)
        self._connections: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        # Also for ranks that are dropped, or left open at the end of the program: multiprocessing
        # would ask those to stop, which waits until they are within a task, and then wait for them.
        ended = (self._connections, self._processes, self._folder)
        self._end = util.Finalize(self, _end, args=ended, exitpriority=0)
        try:
            with starting(imports_main=imports_main):
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=serve,
                        args=(theirs, rank, size, threads, str(self._stacks(rank)), imports_main),
                        name=f"rank {rank} of {size}",
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self._connections.append(ours)
                    self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        task: Callable[..., Any],
        args: Sequence[object] = (),
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call `task(*args)` on every rank, within a world of these ranks.

        Args:
            task: Anything that pickles, such as a function at the top of a module.
            args: The same arguments for every rank; the rank is in torch.distributed.
            timeout_s: Seconds after which the ranks are stopped; None waits for ever.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: A rank raised, died or took too long. The processes are stopped then.
            KeyboardInterrupt: A second one; the first is passed on to the ranks.
        """
        self._start(task, args)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            reports = self._collect(deadline)
            return [pickle.loads(reports[rank].result) for rank in range(self.size)]
        except BaseException:
            self.close()
            raise

    def open(self, task: Callable[..., Any], args: Sequence[object] = ()) -> RankSession:
        """Call `task(messages, *args)` on every rank, to answer messages until the session closes.

        `task` answers once when it is ready, and once for each message that it takes from
        `messages`, an iterator (`Messages`). Signals that ask to stop do not reach it.

        Args:
            task: Anything that pickles, as for `run`.
            args: The same arguments for every rank.

        Raises:
            RankError: The ranks were stopped before.
        """
        return RankSession(self, task, args)

    def close(self) -> None:
        """Stop the processes. Calling it again does nothing."""
        if not self.is_usable:
            return
        self.is_usable = False
        self._end()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how it is done ------------------------------------------------------------------

    def _start(
        self, task: Callable[..., Any], args: Sequence[object], *, is_session: bool = False
    ) -> None:
        if not self.is_usable:
            raise RankError("These ranks were stopped after a failure; start new ones.")
        self._tasks += 1
        store = os.path.join(self._folder.name, f"store-{self._tasks}")
        # The call is pickled apart: a rank that cannot load it reports that as its failure.
        payload = pickle.dumps(Task(pickle.dumps((task, tuple(args))), store, is_session))
        for rank_connection in self._connections:
            # A rank that died since the last task is found by who collects, where its end is told.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank_connection.send_bytes(payload)

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name, f"stacks-{rank}")

    def _collect(self, deadline: float | None) -> dict[int, Report]:
        reports: dict[int, Report] = {}
        dead: dict[int, int | None] = {}
        is_failing = is_interrupted = False
        while len(reports) + len(dead) < self.size:
            try:
                self._receive(reports, dead, deadline)
            except KeyboardInterrupt:
                # The first one is for the ranks, which may have something to save.
                if is_interrupted:
                    raise
                is_interrupted = True
                self._interrupt()
            has_failed = bool(dead) or any(r.failed_at is not None for r in reports.values())
            if has_failed and not is_failing:
                is_failing = True
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
            if deadline is not None and time.monotonic() >= deadline:
                break
        running = [r for r in range(self.size) if r not in reports and r not in dead]
        if is_failing or running:
            failure = self._failure(reports, dead, running)
            if is_interrupted and dead and all(-(code or 0) in REQUESTS for code in dead.values()):
                # The request came to them before their task could listen for it.
                raise KeyboardInterrupt from failure
            raise failure
        return reports

    def _interrupt(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    def _receive(
        self, reports: dict[int, Report], dead: dict[int, int | None], deadline: float | None
    ) -> None:
        waiting = [r for r in range(self.size) if r not in reports and r not in dead]
        left_s = _LONGEST_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
        timeout = min(left_s, _LONGEST_WAIT_S)
        by_object: dict[Any, int] = {self._connections[r]: r for r in waiting}
        by_object |= {self._processes[r].sentinel: r for r in waiting}
        for ready in connection.wait(list(by_object), timeout):
            rank = by_object[ready]
            if rank in reports or rank in dead:
                continue
            try:
                # A rank that reported and then died is known by its report.
                if self._connections[rank].poll():
                    reports[rank] = self._connections[rank].recv()
                elif not self._processes[rank].is_alive():
                    dead[rank] = self._processes[rank].exitcode
            except (EOFError, ConnectionResetError):
                self._processes[rank].join()
                dead[rank] = self._processes[rank].exitcode

    def _failure(
        self, reports: dict[int, Report], dead: dict[int, int | None], running: list[int]
    ) -> RankError:
        failed = {r: report for r, report in reports.items() if report.failed_at is not None}
        stacks = {rank: self._dump(rank) for rank in running}
        error = None
        if dead:
            first = min(dead)
            cause = f"rank {first} of {self.size} died: {end_of(dead[first])}"
        elif failed:
            # A rank that only repeats another's error may have been the quicker one.
            first = min(failed, key=lambda r: (failed[r].is_echo, failed[r].failed_at or 0.0))
            cause = f"rank {first} of {self.size} failed\n{failed[first].traceback}"
            # Some exceptions cannot be pickled, and some not be loaded here.
            with contextlib.suppress(Exception):
                error = pickle.loads(failed[first].error)
        else:
            first = -1
            cause = f"ranks {running} of {self.size} did not finish in time"
        lines = [cause.rstrip()]
        for rank in range(self.size):
            if rank == first:
                continue
            if rank in failed:
                lines.append(f"rank {rank}: then {failed[rank].headline}")
            elif rank in dead:
                lines.append(f"rank {rank}: died, {end_of(dead[rank])}")
            elif rank in stacks:
                lines.append(f"rank {rank}: still running, stopped at\n{stacks[rank]}")
            else:
                lines.append(f"rank {rank}: finished")
        return RankError("\n".join(lines), error)

    def _dump(self, rank: int) -> str:
        return stacks_of(self._processes[rank].pid, self._stacks(rank))


def run_local(
    task: Callable[..., Any],
    size: int,
    args: Sequence[object] = (),
    *,
    threads: int = 1,
    preload: Sequence[str] = (),
    timeout_s: float | None = None,
) -> list[Any]:
    """Call `task(*args)` in `size` fresh local processes that form a world; see `LocalRanks`.

    An error of pcomm's own (a `PcommError`) on the rank that failed first is raised as it is.
    """
    with LocalRanks(size, threads=threads, preload=preload) as ranks:
        try:
            return ranks.run(task, args, timeout_s=timeout_s)
        except RankError as problem:
            if isinstance(problem.error, PcommError | KeyboardInterrupt):
                raise problem.error from problem
            raise


def _end(
    connections: Sequence[Connection],
    processes: Sequence[mp.process.BaseProcess],
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    """Let ranks that wait for a task end by themselves, and end the others."""
    for rank_connection in connections:
        rank_connection.close()
    for process in processes:
        process.join(0.2)
        if process.is_alive():
            process.kill()
        process.join()
        # Its files would stay open as long as an error refers to the process.
        process.close()
    folder.cleanup()
