"""Processes of ranks that are watched: their reports are read, and their ends told in a store."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from pcomm.core.process.launch import TaskReport, end_of

__all__ = ["ProcessWatch", "RankReport", "WatchedProcess"]


_log = logging.getLogger(__name__)
# Bytes that are read at a time, so that no rank keeps the thread from the others.
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class RankReport:
    """How the process of a rank ended.

    Attributes:
        rank: Rank of the process.
        incarnation: Number of processes that had this rank before.
        reason: `finished` for a task that returned, `failed: ...` for one that raised, or how the
            process ended, such as `killed by SIGKILL`; one line.
        result: The task's return value; None if it did not return.
        error: The task's exception if it could be carried over, or the one of loading its result.
        traceback: Traceback of the task's exception; empty if there was none.
    """

    rank: int
    incarnation: int
    reason: str
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @property
    def has_finished(self) -> bool:
        """Whether the task returned."""
        return self.reason == "finished"


@dataclass
class WatchedProcess:
    """A process that runs, and what has come of its report: pickled, without a length before it."""

    incarnation: int
    process: mp.process.BaseProcess
    reports: Connection
    sent: bytearray = field(default_factory=bytearray)

    def receive(self) -> bool:
        """Take more of the report, without waiting for it; False if there is nothing more now."""
        # A process may stand still, or be killed, in the middle of a long one.
        os.set_blocking(self.reports.fileno(), False)
        try:
            part = os.read(self.reports.fileno(), _PART_BYTES)
        except BlockingIOError:
            return False
        self.sent += part
        if not part:
            self.reports.close()
        return bool(part)

    def report(self) -> TaskReport | None:
        """The report; None if the process ended before all of it was sent."""
        # Which error the half of a report raises depends on where it ends.
        with contextlib.suppress(Exception):
            found: TaskReport = pickle.loads(self.sent)
            return found
        return None


class ProcessWatch:
    """A thread that waits for the ends of processes, and tells each in a store.

    Args:
        store: Connection to the store, for this thread alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._running: dict[int, WatchedProcess] = {}
        self._ended: dict[int, RankReport] = {}
        self._waken, self._waker = mp.Pipe(duplex=False)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pcomm process watch", daemon=True)
        self._thread.start()

    def add(self, rank: int, process: WatchedProcess) -> None:
        """Watch the new process of a rank."""
        with self._changed:
            self._ended.pop(rank, None)
            self._running[rank] = process
        self._waker.send_bytes(b"process")

    def running(self, rank: int) -> tuple[int, int] | None:
        """Incarnation and process id of a rank; None if its process has ended."""
        with self._changed:
            found = self._running.get(rank)
            if found is None or found.process.pid is None:
                return None
            return found.incarnation, found.process.pid

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank, unless it has ended."""
        with self._changed, contextlib.suppress(ProcessLookupError):
            found = self._running.get(rank)
            if found is not None and found.process.pid is not None:
                os.kill(found.process.pid, number)

    def reports(self, timeout_s: float, ranks: Sequence[int]) -> dict[int, RankReport]:
        """The reports of those that have ended, once all `ranks` have or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: all(r in self._ended for r in ranks), timeout_s)
            return dict(self._ended)

    def close(self) -> None:
        """End the thread, and kill the processes that run. The store does not get their ends."""
        if self._is_closed:
            return
        self._is_closed = True
        # First, so that an interrupt while the rest is waited for leaves no process behind.
        with self._changed:
            for found in self._running.values():
                found.process.kill()
        self._waker.send_bytes(b"end")
        self._thread.join()
        for found in self._running.values():
            found.process.join()
            _close(found)
        self._running.clear()
        self._waken.close()
        self._waker.close()
        del self._store

    def _run(self) -> None:
        while True:
            waited: dict[Any, int] = {}
            with self._changed:
                for rank, found in self._running.items():
                    waited[found.process.sentinel] = rank
                    if not found.reports.closed:
                        waited[found.reports] = rank
            for ready in connection.wait([self._waken, *waited]):
                if self._is_closed:
                    return
                if ready is self._waken:
                    self._waken.recv_bytes()
                # A report and the end of its process may come at once, in either order.
                elif waited[ready] not in self._running:
                    continue
                elif isinstance(ready, Connection):
                    self._running[waited[ready]].receive()
                else:
                    self._record_end(waited[ready])

    def _record_end(self, rank: int) -> None:
        found = self._running[rank]
        while not found.reports.closed and found.receive():
            pass
        found.process.join()
        report = _report_of(rank, found)
        # In the store before another process can be started for this rank.
        try:
            number = self._store.add("pcomm/ended/count", 1)
            told = f"{rank} {found.incarnation} {report.reason}"
            self._store.set(f"pcomm/ended/{number}", told)
        except RuntimeError:
            # Torch's, of a store that is gone: `reports` must not wait for the other ends for ever.
            _log.warning("the end of rank %d could not be told in the store", rank, exc_info=True)
        with self._changed:
            del self._running[rank]
            self._ended[rank] = report
            self._changed.notify_all()
        _close(found)


def _close(found: WatchedProcess) -> None:
    found.reports.close()
    # Its files would stay open as long as something refers to the process.
    found.process.close()


def _report_of(rank: int, found: WatchedProcess) -> RankReport:
    report = found.report()
    if report is None:
        return RankReport(rank, found.incarnation, end_of(found.process.exitcode))
    if report.failed_at is None:
        try:
            return RankReport(rank, found.incarnation, "finished", pickle.loads(report.result))
        except Exception as problem:  # of a module that only the rank has, for example
            return RankReport(rank, found.incarnation, "finished", None, problem)
    reason = " ".join(f"failed: {report.headline}".split())
    return RankReport(rank, found.incarnation, reason, None, report.exception(), report.traceback)
