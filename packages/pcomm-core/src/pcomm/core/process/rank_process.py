"""What runs in a process of `LocalRanks`: one task after another, each in a fresh world."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from pcomm.core.errors import PeerError
from pcomm.core.process.end_with_parent import end_with_parent
from pcomm.core.process.messages import Messages

__all__ = [
    "REQUESTS",
    "Report",
    "Task",
    "as_rank",
    "blocked_requests",
    "failure_report",
    "serve",
]

REQUESTS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that ask a task to stop."""


@dataclass(frozen=True)
class Report:
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


@dataclass(frozen=True)
class Task:
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


def _attempt(task: Task, rank: int, size: int, caller: Connection) -> Report:
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
        return Report(None, result)
    except BaseException as error:  # everything that ends a task is reported, then raised there
        return failure_report(error, failed_at or time.monotonic())
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def failure_report(error: BaseException, failed_at: float) -> Report:
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
    return Report(failed_at, b"", headline, traceback.format_exc(), carried, is_echo)


@contextlib.contextmanager
def blocked_requests() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
