"""Communicators that are being connected: waits for members that do not come, and threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.control import without_control as unconnected
from pcomm.core.control.without_control import unconnected_default
from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups import communicators, opening
from pcomm.core.groups.communicators import ConnectingStore, OwnConnections
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, grant
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

# Far beyond what any of these tests may take: a rank that waits for it fails the test.
WAIT_S = 3600.0
# Nothing comes within it, so it may be short.
CONNECT_S = 0.2
MESSAGES = ["dp:: ranks 0-1", "no more memory"]
OPTIONS = [CommOptions(), CommOptions(threads=1)]


@pytest.mark.parametrize("options", OPTIONS, ids=["gloo", "threads"])
@ranks(2)
def test_a_member_that_does_not_come_is_waited_for_as_long_as_asked(
    rank: int, options: CommOptions
) -> None:
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match="ranks 0-1"):
            communicators.new_communicator(
                "alone in it",
                (0, 1),
                grant(options, "gloo", group="dp"),
                store=distributed_c10d._get_default_store(),
                rank=rank,
                description="test",
                connect_s=CONNECT_S,
            )
    dist.barrier()


@ranks(2)
def test_a_member_that_cannot_connect_ends_the_wait_of_the_others(rank: int) -> None:
    asked: list[float] = []

    def connect(*args: Any, connect_s: float, **options: Any) -> dist.ProcessGroup:
        asked.append(connect_s)
        if rank == 1:
            raise RuntimeError("no more memory")
        return communicators.new_communicator(*args, connect_s=CONNECT_S, **options)

    with (
        mock.patch.object(opening, "new_communicator", connect),
        pytest.raises(RuntimeError if rank else PeerTimeoutError, match=MESSAGES[rank]),
    ):
        open_groups(Topology({"dp": 2}), ["dp"], timeout_s=WAIT_S)
    assert asked == [WAIT_S]


def test_a_store_passes_every_call_on_and_has_a_limit_until_that_is_lifted() -> None:
    inner = dist.HashStore()
    store = ConnectingStore(inner, CONNECT_S)
    # As torch's communicators call it.
    outer = dist.PrefixStore("prefix", store)
    outer.set("a", "1")
    assert (outer.get("a"), inner.get("prefix/a")) == (b"1", b"1")
    assert (outer.add("n", 2), outer.add("n", 3)) == (2, 5)
    assert outer.compare_set("b", "", "2") == b"2"
    assert outer.check(["a", "b"])
    assert outer.num_keys() == 3
    assert outer.delete_key("b")
    assert not outer.check(["b"])
    outer.wait(["a"], timedelta(seconds=WAIT_S))
    assert store.timed_out_s is None
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        outer.wait(["b"], timedelta(seconds=WAIT_S))
    assert store.timed_out_s == CONNECT_S
    store.lift()
    waiting = threading.Thread(target=outer.wait, args=(["b"], timedelta(seconds=WAIT_S)))
    waiting.start()
    waiting.join(2 * CONNECT_S)
    assert waiting.is_alive()
    outer.set("b", "")
    waiting.join()


@contextlib.contextmanager
def _communicator_like() -> Iterator[socket.socket]:
    """A poll of a listening socket and a connected one, as gloo has; yields the latter."""
    with contextlib.ExitStack() as held:
        listening = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = held.enter_context(socket.create_connection(listening.getsockname()))
        held.enter_context(listening.accept()[0])
        poll = held.enter_context(select.epoll())
        poll.register(listening.fileno())
        poll.register(ours.fileno())
        yield ours


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a poll watches")
def test_connections_are_known_where_one_communicator_was_made_and_not_where_two_were() -> None:
    with contextlib.ExitStack() as held:
        with OwnConnections.recorded() as one:
            first = held.enter_context(_communicator_like())
        with OwnConnections.recorded() as two:
            others = [held.enter_context(_communicator_like()) for _ in range(2)]
        assert one
        assert not two
        two.shut_down()
        for other in others:
            assert other.send(b"goes") == 4
        # No thread of gloo closes it here.
        with mock.patch.object(communicators, "_CLOSING_S", 0.0):
            one.shut_down()
        with pytest.raises(BrokenPipeError):
            first.send(b"ended")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a poll watches")
def test_numbers_that_are_other_files_by_now_are_left_alone() -> None:
    with contextlib.ExitStack() as held:
        with OwnConnections.recorded() as known:
            ours = held.enter_context(_communicator_like())
        number = ours.detach()
        os.close(number)
        # Files take the lowest number that is free.
        files = [held.enter_context(open(os.devnull)) for _ in range(8)]
        assert number in {file.fileno() for file in files}
        before = os.listdir("/proc/self/fd")
        known.shut_down()
        assert {*os.listdir("/proc/self/fd")} <= {*before}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a poll watches")
@ranks(2)
def test_a_thread_of_gloo_that_turns_around_a_message_is_not_waited_for(rank: int) -> None:
    with OwnConnections.recorded() as own:
        group = dist.new_group([0, 1])
    assert own
    received = torch.zeros(1)
    if rank == 0:
        # Asked for, and given up before it comes: gloo finds no place for the message, for ever.
        group.recv([received], 1, 0)
    dist.barrier()
    if rank == 1:
        group.send([torch.ones(1)], 0, 0).wait()
    dist.barrier()
    if rank == 0:
        with mock.patch.object(communicators, "_CLOSING_S", WAIT_S):
            own.shut_down()
        assert received.item() == 0
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a poll watches")
def test_a_thread_of_gloo_that_is_late_is_waited_for() -> None:
    with contextlib.ExitStack() as held:
        with OwnConnections.recorded() as own:
            ours = held.enter_context(_communicator_like())
        # The time that it has run, which ends below the limit when it closes the connection.
        run_s = itertools.chain((0.0,) * 20, itertools.count(0.0, 0.01))
        held.enter_context(mock.patch.object(communicators, "_run_s", side_effect=run_s))
        pauses = iter(range(40))

        def pause(_: float) -> None:
            if next(pauses) == 39:
                ours.close()

        held.enter_context(mock.patch.object(communicators.time, "sleep", pause))
        own.shut_down()
        assert ours.fileno() == -1


def test_a_default_group_that_cannot_begin_keeps_no_later_one() -> None:
    store = dist.HashStore()

    def cannot() -> None:
        with pytest.raises(ValueError, match="no rank 5"), unconnected_default(store, 5, 1):
            raise AssertionError("entered")

    with mock.patch.object(unconnected, "_begin", side_effect=ValueError("no rank 5")):
        thread = threading.Thread(target=cannot)
        thread.start()
        thread.join()
    with unconnected_default(store, 0, 1):
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_thread_that_is_done_leaves_the_default_group_to_one_that_is_not() -> None:
    store = dist.HashStore()

    def other() -> None:
        with unconnected_default(store, 0, 1):
            pass

    with unconnected_default(store, 0, 1):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert dist.is_initialized()
    assert not dist.is_initialized()
