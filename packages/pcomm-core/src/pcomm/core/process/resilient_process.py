"""What runs in a process of `ResilientRanks`: one task, and the report of its end."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from multiprocessing.connection import Connection

from pcomm.core.process.rank_place import RankPlace
from pcomm.core.process.rank_process import REQUESTS, Report, as_rank, failure_report

__all__ = ["run_once"]


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
            report = Report(None, pickle.dumps(function(place, *args)))
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
