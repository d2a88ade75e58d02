"""Threads of one process that make communicators at the same time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from pcomm.core.control import without_control as unconnected
from pcomm.core.control.without_control import unconnected_default
from pcomm.core.groups.communicators import OwnConnections


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
