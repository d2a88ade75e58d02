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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pcomm.core.errors import PcommError
from pcomm.core.process.launch import (
    REQUESTS,
    Answer,
    End,
    RankError,
    RankTask,
    TaskReport,
    end_of,
    fork_server,
    next_wait_s,
    serve,
    start_rank,
    starting,
)
from pcomm.core.process.signals import deferred_interrupt, stacks_of

__all__ = ["LocalRanks", "RankError", "RankSession", "run_local"]


# How long the other ranks may take to finish by themselves once one has failed.
_GRACE_S = 2.0
# How long ranks may take to answer that one of them has met an exception: some wait for that one.
_ANSWER_GRACE_S = 10.0
# How long the ranks may take to end their task once it was told to end.
_ENDING_S = 2.0


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
                    stacks, name = str(self._stacks(rank)), f"rank {rank} of {size}"
                    given = rank, size, threads, stacks, imports_main
                    process, ours = start_rank(context, name, serve, *given, duplex=True)
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
        payload = pickle.dumps(RankTask(pickle.dumps((task, tuple(args))), store, is_session))
        for rank_connection in self._connections:
            # A rank that died since the last task is found by who collects, where its end is told.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank_connection.send_bytes(payload)

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name, f"stacks-{rank}")

    def _collect(self, deadline: float | None) -> dict[int, TaskReport]:
        reports: dict[int, TaskReport] = {}
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
        self, reports: dict[int, TaskReport], dead: dict[int, int | None], deadline: float | None
    ) -> None:
        waiting = [r for r in range(self.size) if r not in reports and r not in dead]
        by_object: dict[Any, int] = {self._connections[r]: r for r in waiting}
        by_object |= {self._processes[r].sentinel: r for r in waiting}
        for ready in connection.wait(list(by_object), next_wait_s(deadline)):
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
        self, reports: dict[int, TaskReport], dead: dict[int, int | None], running: list[int]
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
            error = failed[first].exception()
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


# A signal that arrives right before a wait begins is acted on when the wait ends, so none is long.
class RankSession:
    """One task on all ranks, which gets the same messages in the same order; see `LocalRanks.open`.

    Between messages the ranks wait without using the processor, and no collective is entered, so
    none can run into its time limit. The process that sends the messages takes part in no
    collective: a rank that dies or hangs is noticed here, and nothing here hangs with it.

    Once a rank is lost, all are stopped, and each further call raises the same error.

    Ctrl-C comes before a message is sent, or while the answers are waited for, and neither loses
    anything. A second one while bytes are sent or received ends the session, as does an exception
    of another signal's handler there; `failure` tells it at once.

    Attributes:
        num_sent: Number of messages that were sent. It grows together with the sending, so that
            a caller that was interrupted in `send` can tell whether the ranks got the message.
    """

    def __init__(
        self, ranks: LocalRanks, task: Callable[..., Any], args: Sequence[object] = ()
    ) -> None:
        self._ranks = ranks
        self.num_sent = 0
        self._answers: dict[int, Answer] = {}
        self._lost: Exception | None = None
        # The call that sends or receives bytes now, or that an exception has cut short.
        self._cut = ""
        ranks._start(task, args, is_session=True)

    @property
    def failure(self) -> str:
        """The reason why the ranks answer no more; empty while they do. Local, from any thread."""
        if self._lost is not None:
            return str(self._lost).splitlines()[0]
        if not self._ranks.is_usable:
            return "the ranks were stopped"
        for rank, process in enumerate(self._ranks._processes):
            try:
                sentinel = process.sentinel
            except ValueError:
                # Closed by another thread meanwhile.
                return "the ranks were stopped"
            if connection.wait([sentinel], 0):
                return f"rank {rank} of {self._ranks.size} died"
        return ""

    def send(self, message: object) -> None:
        """Send a message to all ranks; `answers` has what they say. The one before is answered.

        Raises:
            RankError: A rank was lost before.
        """
        payload = pickle.dumps(message)
        self._check()
        assert not self._missing, "each message is answered before the next one"
        with self._whole("send"):
            self._answers = {}
            self.num_sent += 1
            for rank_connection in self._ranks._connections:
                # A rank that is gone is found by `answers`, where its end is told.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rank_connection.send_bytes(payload)

    def answers(self, timeout_s: float | None = None) -> list[Answer]:
        """What each rank says to the last message, or to the start, in rank order.

        An interrupt while it waits loses nothing: another call goes on waiting. After an answer
        with an error the other ranks have some seconds, since they may wait for that rank.

        Args:
            timeout_s: Seconds after which the ranks are stopped; None waits for ever.

        Raises:
            RankError: A rank raised, died or did not answer. All are stopped then.
        """
        self._check()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._missing:
            self._receive(deadline)
            failed = [rank for rank, one in self._answers.items() if one.error is not None]
            if failed and self._missing:
                grace = time.monotonic() + _ANSWER_GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
                self._wait_for_others(failed[0], deadline)
            elif self._missing and deadline is not None and time.monotonic() >= deadline:
                cause = f"ranks {self._missing} of {self._ranks.size} did not answer in time"
                self._lose(cause, running=self._missing)
        return [self._answers[rank] for rank in range(self._ranks.size)]

    def ask(self, message: object, timeout_s: float | None = None) -> list[Answer]:
        """`send`, then `answers`."""
        self.send(message)
        return self.answers(timeout_s)

    def close(self) -> None:
        """End the task on all ranks; they can be used again. Calling it again does nothing.

        Ranks that have not answered, or do not end soon, are stopped.
        """
        if not self._ranks.is_usable or self._lost is not None:
            return
        try:
            if not self._missing:
                self.send(End())
                # The reports of the tasks are read as `LocalRanks.run` reads them.
                self._ranks._collect(time.monotonic() + _ENDING_S)
                self._lost = RankError("This session is closed; open a new one.")
                return
        except RankError:
            # A rank that ends with an error, or late, has given its answers before.
            pass
        except BaseException:
            self._ranks.close()
            raise
        self._ranks.close()

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._ranks.size) if rank not in self._answers]

    def _wait_for_others(self, failed: int, deadline: float) -> None:
        while self._missing:
            self._receive(deadline)
            if self._missing and time.monotonic() >= deadline:
                error = self._answers[failed].error
                self._lose(
                    f"rank {failed} of {self._ranks.size} failed alone: "
                    f"{type(error).__name__}: {error}",
                    error,
                    running=self._missing,
                )

    def _receive(self, deadline: float | None) -> None:
        """Wait for answers and ends of ranks, but not for long."""
        ranks = self._ranks
        waited: dict[Any, int] = {ranks._connections[rank]: rank for rank in self._missing}
        # A rank that has answered may die while others compute.
        waited |= {process.sentinel: rank for rank, process in enumerate(ranks._processes)}
        for ready in connection.wait(list(waited), next_wait_s(deadline)):
            rank = waited[ready]
            if rank not in self._answers and ranks._connections[rank].poll():
                with self._whole("answers"):
                    try:
                        found = ranks._connections[rank].recv()
                    except (EOFError, ConnectionResetError):
                        self._lose_dead(rank)
                    if isinstance(found, TaskReport):
                        self._lose_ended(rank, found)
                    self._answers[rank] = found
            elif isinstance(ready, int):
                self._lose_dead(rank)

    def _lose_ended(self, rank: int, report: TaskReport) -> None:
        where = f"rank {rank} of {self._ranks.size}"
        if report.failed_at is None:
            self._lose(f"{where} ended its task before the session")
        self._lose(
            f"{where} failed: {report.headline}\n{report.traceback.rstrip()}", report.exception()
        )

    def _lose_dead(self, rank: int) -> None:
        self._ranks._processes[rank].join()
        how = end_of(self._ranks._processes[rank].exitcode)
        self._lose(f"rank {rank} of {self._ranks.size} died: {how}")

    def _lose(
        self, cause: str, error: BaseException | None = None, *, running: Sequence[int] = ()
    ) -> NoReturn:
        """Stop all ranks, and raise why; with the stacks of those that should have answered."""
        lines = [cause]
        for rank in running:
            lines.append(f"rank {rank}: still running, stopped at\n{self._ranks._dump(rank)}")
        self._lost = RankError("\n".join(lines), error)
        self._ranks.close()
        raise self._lost

    @contextlib.contextmanager
    def _whole(self, call: str) -> Iterator[None]:
        """A block that sends or receives bytes: what cuts it short ends the session."""
        with deferred_interrupt():
            self._cut = call
            try:
                yield
            except BaseException as error:
                self._end_cut(error)
                raise
            self._cut = ""

    def _end_cut(self, error: BaseException | None = None) -> None:
        if self._lost is None:
            self._lost = RankError(
                f"{self._cut} was cut short by {type(error).__name__ if error else 'a signal'}, so "
                "messages and answers no longer belong together."
            )
            self._ranks.close()

    def _check(self) -> None:
        if self._cut:
            self._end_cut()
        if self._lost is None and not self._ranks.is_usable:
            self._lost = RankError("These ranks were stopped; start new ones.")
        if self._lost is not None:
            raise self._lost
