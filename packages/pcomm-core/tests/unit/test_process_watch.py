"""Ends of processes that are told, however they ended and whatever became of the store."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist

from pcomm.core.process.launch import TaskReport, end_of
from pcomm.core.process.process_watch import ProcessWatch, RankReport, WatchedProcess
from pcomm.core.testing.programs import PATIENCE_S, scaled_s


class EndedProcess:
    """What `WatchedProcess` needs of a process; this one was killed."""

    pid, exitcode = None, -signal.SIGKILL

    def __init__(self) -> None:
        self.sentinel, self._other_end = os.pipe()
        os.close(self._other_end)

    def join(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.sentinel)


def watched(report: bytes) -> WatchedProcess:
    """A process that has ended after it sent these bytes."""
    ours, theirs = mp.Pipe(duplex=False)
    os.write(theirs.fileno(), report)
    theirs.close()
    return WatchedProcess(0, cast(Any, EndedProcess()), ours)


def report_of(store: Any, sent: bytes) -> RankReport:
    watch = ProcessWatch(store)
    try:
        watch.add(3, watched(sent))
        return watch.reports(scaled_s(PATIENCE_S), [3])[3]
    finally:
        watch.close()


WHOLE = pickle.dumps(TaskReport(None, pickle.dumps([1, 2, 3])))


def test_a_report_and_the_end_are_told() -> None:
    store = dist.HashStore()
    assert report_of(store, WHOLE) == RankReport(3, 0, "finished", [1, 2, 3])
    assert store.get("pcomm/ended/1") == b"3 0 finished"


def test_of_a_part_of_a_report_only_the_end_is_known() -> None:
    parts = [watched(b"") for _ in WHOLE]
    for length, part in enumerate(parts):
        part.sent += WHOLE[:length]
    assert [part.report() for part in parts] == [None] * len(WHOLE)
    for part in parts:
        part.reports.close()
        part.process.close()
    # Bytes that are no pickle at all, of a task that wrote to what it should not.
    assert report_of(dist.HashStore(), b"cno_such_module\nname\n.").reason == "killed by SIGKILL"


def test_an_end_is_known_where_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    store = mock.Mock()
    store.add.side_effect = dist.DistNetworkError("connection reset")
    assert report_of(store, b"").reason == "killed by SIGKILL"
    assert "the end of rank 3 could not be told" in caplog.text


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "killed by SIGKILL"), (-40, "killed by signal 40"), (1, "exit code 1")],
)
def test_every_end_has_words(code: int, words: str) -> None:
    assert end_of(code) == words
