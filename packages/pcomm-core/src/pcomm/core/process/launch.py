"""How a process becomes a rank: the server it is forked from, tasks, messages and reports."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pcomm.core.errors import PeerError
from pcomm.core.process.signals import end_with_parent

__all__ = [
    "REQUESTS",
    "Answer",
    "End",
    "Messages",
    "RankError",
    "RankTask",
    "TaskReport",
    "as_rank",
    "end_of",
    "failure_report",
    "fork_server",
    "next_wait_s",
    "portable_error",
    "serve",
    "start_rank",
    "starting",
]


REQUESTS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that ask a task to stop."""

# A signal that arrives right before a wait begins is acted on when the wait ends, so none is long.
_LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class RankTask:
    """What a rank is sent to run.

    Args:
        call: The function and its arguments, pickled.
        store: File of the store of its world.
        is_session: True for a task that gets `Messages` as its first argument. Requests to stop do
            not reach it: they are for the process that sends the messages.
    """

    call: bytes
    store: str
    is_session: bool = False


@dataclass(frozen=True)
class TaskReport:
    """What a rank says of a finished task.

    The result and the error are pickled apart: what cannot be loaded here, such as an exception
    of a module that only the ranks have, must not take the traceback with it.
    """

    failed_at: float | None
    result: bytes = b""
    headline: str = ""
    traceback: str = ""
    error: bytes = b""
    is_echo: bool = False

    def exception(self) -> BaseException | None:
        """The task's error; None where it could not be pickled there, or not be loaded here."""
        with contextlib.suppress(Exception):
            found: BaseException = pickle.loads(self.error)
            return found
        return None


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The context of the server, which has imported torch; it starts with the first process. Local.

    Args:
        preload: Modules that the server imports before it forks, so that ranks need not; beside
            them it imports those of pcomm that this process has imported.
    """
    context = mp.get_context("forkserver")
    own = ["torch", "torch.distributed", __name__]
    # Ranks run the script of this process again, up to its `__main__`: they import the same.
    imported = [name for name in list(sys.modules) if name.startswith("pcomm.")]
    context.set_forkserver_preload([*own, *preload, *imported])
    return context


@contextlib.contextmanager
def starting(*, imports_main: bool) -> Iterator[None]:
    """A block that starts processes of ranks.

    A process takes over what is blocked here: a request to stop, which a terminal or a batch system
    sends to all processes, reaches a rank within a task, and neither the server that imports torch,
    which knows when ranks end, nor a rank that waits.

    Args:
        imports_main: False to keep the processes from running the program's own file.
    """
    # Starting the tracker would lift the block.
    resource_tracker.ensure_running()
    with _blocked_requests(), contextlib.nullcontext() if imports_main else _no_main():
        yield


def start_rank(
    context: ForkServerContext, name: str, target: Callable[..., None], *args: object, duplex: bool
) -> tuple[BaseProcess, Connection]:
    """A process that calls `target` with its end of a pipe and `args`, and our end of the pipe."""
    ours, theirs = context.Pipe(duplex)
    process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def next_wait_s(deadline: float | None) -> float:
    """Seconds until the next look at `deadline`, in time of `time.monotonic`; None for none."""
    left_s = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
    return min(max(left_s, 0.0), _LONGEST_WAIT_S)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Let processes that start here not run the program's file as a module."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _blocked_requests() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(
    tasks: Connection, rank: int, size: int, threads: int, stacks: str, has_main: bool
) -> None:
    """Run tasks until the other end closes.

    Args:
        tasks: Connection from which tasks come, and to which reports go.
        rank: Rank of this process.
        size: Number of ranks.
        threads: Number of threads that torch uses.
        stacks: File for the stacks that SIGUSR1 asks for.
        has_main: True if this process has run the program's own file.
    """
    with as_rank(threads, stacks, has_main=has_main):
        while True:
            try:
                task = tasks.recv()
            except EOFError:
                return
            try:
                tasks.send(_attempt(task, rank, size, tasks))
            except (BrokenPipeError, ConnectionResetError):
                return


@contextlib.contextmanager
def as_rank(threads: int, stacks: str, *, has_main: bool) -> Iterator[None]:
    """A block in which this process is a rank: it ends with its launcher, and tells its stacks.

    Args:
        threads: Number of threads that torch uses.
        stacks: File for the stacks that SIGUSR1 asks for. It is there once the signal may be sent,
            which would end the process before.
        has_main: True if this process has run the program's own file.
    """
    end_with_parent()
    if not has_main:
        # Collections of cycles leave out what the server has imported: walking through it takes
        # 0.1 s and copies memory that all ranks share. Objects of a program's file stay in sight
        # of those who look for referrers.
        gc.freeze()
    torch.set_num_threads(threads)
    with open(f"{stacks}.new", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.replace(file.name, stacks)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _attempt(task: RankTask, rank: int, size: int, caller: Connection) -> TaskReport:
    failed_at = None
    try:
        if not task.is_session:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        function, args = pickle.loads(task.call)
        if task.is_session:
            args = (Messages(caller), *args)
        file = dist.FileStore(task.store, size)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=size)
        # A task may be over on one rank before another has connected, which would fail there.
        if file.add("pcomm/connected", 1) == size:
            file.set("pcomm/all connected", "")
        file.wait(["pcomm/all connected"])
        try:
            # By value: the connection's own pickling would hand tensors over as open files.
            result = pickle.dumps(function(*args))
        except BaseException:
            # Taken before the end of the group, which is what makes other ranks fail.
            failed_at = time.monotonic()
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return TaskReport(None, result)
    except BaseException as error:  # everything that ends a task is reported, then raised there
        return failure_report(error, failed_at or time.monotonic())
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def failure_report(error: BaseException, failed_at: float) -> TaskReport:
    """The report of a task that ended with an error; called where the error is handled.

    From then on this process ignores requests to stop: a second one must not end it before its
    report is sent. It gets no other task.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    carried = b""
    with contextlib.suppress(Exception):
        carried = pickle.dumps(error)
    headline = traceback.format_exception_only(error)[0].strip()
    is_echo = isinstance(error, PeerError)
    return TaskReport(failed_at, b"", headline, traceback.format_exc(), carried, is_echo)


class RankError(Exception):
    """A rank failed, died or hung; the message starts with what happened there.

    Args:
        message: The failing rank, its traceback, and what the others were doing.
        error: The exception of the failing rank, where it could be carried over.
    """

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.error = error


def end_of(exit_code: int | None) -> str:
    """How a process ended, in words. Local."""
    if exit_code is not None and exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:  # most real-time signals have no name
            return f"killed by signal {-exit_code}"
    return f"exit code {exit_code}"


class Messages:
    """The messages of a session on one rank; an iterator that ends with the session.

    Each message is answered before the next one is read.

    Args:
        caller: Connection to the process that has opened the session.
    """

    def __init__(self, caller: Connection) -> None:
        self._caller = caller
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next message; waits for it without using the processor. Local."""
        message: Any = End()
        if not self._is_over:
            with contextlib.suppress(EOFError, ConnectionResetError):
                message = self._caller.recv()
        self._is_over = isinstance(message, End)
        if self._is_over:
            raise StopIteration
        return message

    def answer(self, value: object, error: BaseException | None = None) -> None:
        """Answer the last message, or the start of the session. Local.

        Args:
            value: Anything that pickles.
            error: An exception that this rank has survived. Ranks that have met the same one answer
                soon; those that do not are taken to wait for this one, and the session ends.
        """
        answer = Answer(value, None if error is None else portable_error(error))
        # By value: the connection's own pickling would hand tensors over as open files.
        self._caller.send_bytes(pickle.dumps(answer))


@dataclass(frozen=True)
class Answer:
    """What one rank says to one message.

    Attributes:
        value: Result of the rank.
        error: An exception that came up meanwhile and that the rank has survived; None for none.
    """

    value: Any
    error: BaseException | None = None


@dataclass(frozen=True)
class End:
    """The last message of a session."""


def portable_error(error: BaseException) -> BaseException:
    """The exception itself if another process can load it, else its words. Local."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(traceback.format_exception_only(error)[0].strip())
