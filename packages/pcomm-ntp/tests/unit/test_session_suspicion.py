"""What is no sign of another rank's failure: memory that this rank lacks, and a late beginning."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives import IdentityCollectives, InstrumentedCollectives, Pending
from pcomm.core.collectives.protocol import Call
from pcomm.core.errors import PeerError, PeerTimeoutError
from pcomm.core.groups.abandoning import abandon_communicators
from pcomm.core.groups.communicators import new_communicator
from pcomm.core.groups.spec import CommOptions, grant
from pcomm.core.process import RankPlace
from pcomm.core.process.store_server import open_store
from pcomm.core.testing.assertions import Living, left_behind
from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until
from pcomm.ntp.session import Timeouts, generation
from pcomm.ntp.session.failure_detection import (
    ExitReports,
    SuspectedFailure,
    Watch,
    translating_errors,
)
from pcomm.ntp.session.generation import run_abandonable
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.quorum import Quorum
from pcomm.ntp.session.records import Decision, Records, StoreLostError
from pcomm.ntp.session.recovery import Recovery
from pcomm.ntp.session.resume_point import RankState

# Memory is lacking again in each generation; any other error of torch's may be another rank's.
ERRORS = [
    (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    (RuntimeError("Connection reset by peer"), SuspectedFailure),
]


class _Broken(InstrumentedCollectives):
    """One of two ranks, whose operations end with an error."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(IdentityCollectives())
        self.size, self._error = 2, error

    def run(self, call: Call) -> Tensor:
        raise self._error

    def start(self, call: Call) -> Pending:
        raise self._error


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=["memory", "connection"])
def test_an_operation_that_lacks_memory_is_an_error_of_this_rank(error, expected, is_async):
    collectives = translating_errors(_Broken(error), lambda: None)
    operation = collectives.all_reduce_async if is_async else collectives.all_reduce
    with pytest.raises(expected, match=str(error)) as raised:
        operation(torch.ones(2))
    assert type(raised.value) is expected


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=["memory", "connection"])
def test_connecting_that_lacks_memory_is_an_error_of_this_rank(error, expected):
    def connect() -> None:
        raise error

    with pytest.raises(expected, match=str(error)) as raised:
        run_abandonable(connect, lambda: None, lambda _: None, "connects")
    assert type(raised.value) is expected


class _Waiting(dist.HashStore):
    """A store that tells when a rank waits in it for the address of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered = threading.Event()

    def wait(self, *args: Any) -> None:
        self.is_entered.set()
        super().wait(*args)


def test_connecting_to_a_rank_that_never_comes_ends_by_itself_once_it_was_left() -> None:
    store, granted = _Waiting(), grant(CommOptions(timeout_s=3600.0), "gloo", group="tp")

    def connect() -> dist.ProcessGroup:
        about = {"store": store, "rank": 0, "description": "tp", "connect_s": 0.5}
        return new_communicator("tp", [0, 1], granted, **about)

    def check() -> None:
        if store.is_entered.is_set():
            raise PeerError("a test", found="a failure", why="It is asked for.", fix="Go on.")

    before, files = Living.now(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerError):
        run_abandonable(connect, check, lambda made: abandon_communicators([made]), "connects")
    # By the limit on the agreement, however long an operation may take.
    assert left_behind(before, within_s=scaled_s(PATIENCE_S)) == []
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "files that are closed")


class _Watching:
    """A watch that fails nothing, and moves the clock: to these seconds, look by look."""

    failure = staticmethod(lambda: None)

    def __init__(self, *looks_s: float) -> None:
        self.now_s, self._looks = 0.0, list(looks_s)

    def check(self) -> None:
        assert self._looks, "it has gone on behind the limit"
        self.now_s = self._looks.pop(0)


def test_a_generation_that_connects_for_longer_than_two_agreements_is_given_up(monkeypatch):
    """Once to agree and once to connect; gloo itself would try for as long as an operation."""
    is_open, is_left, watch = threading.Event(), threading.Event(), _Watching(5.9, 6.0, 6.1, 6.2)
    groups = SimpleNamespace(abandon=is_left.set)

    def connect(*_):
        is_open.wait()
        return generation.Opened(groups, groups)

    monkeypatch.setattr(generation, "_open", connect)
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: watch.now_s))
    job = SimpleNamespace(timeouts=Timeouts(agree_s=3.0))
    control = SimpleNamespace(ranks=(0, 1), generation=1)
    with pytest.raises(PeerTimeoutError, match=r"no connection between all of ranks \[0, 1\]"):
        generation.open_generation(job, None, control, watch)
    # Neither before the limit nor at it.
    assert watch.now_s == 6.1
    # What is open after all is left by itself.
    is_open.set()
    assert is_left.wait(PATIENCE_S)


def test_a_rank_that_is_late_to_begin_is_not_silent() -> None:
    """The first generation has a limit of its own for ranks that never come."""
    store = dist.HashStore()
    records = Records(store)
    watch = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=0.0)
    watch.enter(0, (0, 1), {})
    # It looks after each of its own beats, and any silence would be too long.
    wait_until(lambda: int(records.beat_of(0, 0) or "0") > 3, "looks at rank 1")
    assert watch.failure() is None
    records.beat(0, 1, 1)
    wait_until(lambda: watch.failure() is not None, "word of a rank that began and is silent")
    assert "rank 1: no heartbeat" in str(watch.failure())
    watch.close()


@pytest.mark.parametrize(("generation", "expected"), [(0, (0, 1)), (1, (0,))])
def test_a_quorum_waits_for_a_rank_that_is_late_to_begin(generation, expected) -> None:
    """Another rank may die meanwhile; in a later generation one that has no beat is silent."""
    store = dist.HashStore()
    records, turns = Records(store), itertools.count()

    def begin_late() -> None:
        if next(turns) == 2:
            records.say(generation, 1, RankState())

    limits = Timeouts(dead_after_s=0.0)
    quorum = Quorum(records, ExitReports(store), generation, (0, 1), {}, limits)
    found = quorum.attend(0, RankState(), lambda there, gone: Decision(tuple(there)), begin_late)
    assert found.ranks == expected


def test_a_rank_that_never_begins_a_later_generation_is_silent() -> None:
    store = dist.HashStore()
    watch = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=0.0)
    watch.enter(1, (0, 1), {})
    wait_until(lambda: watch.failure() is not None, "word of a rank that is silent")
    assert "rank 1: no heartbeat" in str(watch.failure())
    watch.close()


def test_a_connection_that_breaks_as_ranks_end_without_their_store_tells_of_the_store() -> None:
    server = open_store("127.0.0.1", 0)
    place = RankPlace(0, 2, "127.0.0.1", server.port)
    member = Membership(place.store, 0, range(2), {0: 0, 1: 1}, {}, Timeouts())
    member.enter()
    recovery = Recovery(SimpleNamespace(device=None, restore=None, copies=None), member)
    recovery.opened = SimpleNamespace()
    # It has not seen yet that the store is gone, of which the other rank has ended.
    member.watch.close()
    del server
    assert member.watch.lost is None
    broken = SuspectedFailure("all_reduce", found="a reset connection", why="", fix="")
    with pytest.raises(StoreLostError):
        recovery.recoverable_reason(broken)


def test_ranks_that_are_lost_together_are_told_to_be_silent_by_the_one_before_them() -> None:
    store = dist.HashStore()
    records, limit_s = Records(store), scaled_s(0.5)
    watch = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=limit_s)
    watch.enter(0, (0, 1, 2, 3), {})
    for rank in (1, 2):
        records.beat(0, rank, 1)

    def both_are_told() -> bool:
        # The last one lives.
        records.beat(0, 3, int(records.beat_of(0, 3) or "0") + 1)
        return all(records.silent(0, rank) for rank in (1, 2))

    wait_until(both_are_told, "word of both ranks")
    assert records.silent(0, 3) is None
    watch.close()


def test_a_rank_that_came_back_is_not_silent_for_as_long_as_it_was_gone() -> None:
    store = dist.HashStore()
    records, limit_s = Records(store), scaled_s(1.0)
    watch = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=limit_s)
    watch.enter(0, (0, 1), {})
    records.beat(0, 1, 3)
    wait_until(lambda: records.silent(0, 1), "word of the rank that died")
    # Its new process happens to have come as far as the old one.
    records.beat(2, 1, 3)
    watch.enter(2, (0, 1), {1: 1})
    wait_until(lambda: int(records.beat_of(2, 0) or "0") > 0, "a heartbeat")
    own = int(records.beat_of(2, 0))
    wait_until(lambda: int(records.beat_of(2, 0)) > own, "a look at the neighbour")
    assert records.silent(2, 1) is None
    watch.close()
