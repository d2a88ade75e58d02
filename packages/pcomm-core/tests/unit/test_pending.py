"""Results in flight that are asked whether they have ended, and waits that a failure ends."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from pcomm.core.collectives.gloo_queue import WorkQueue
from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import PeerError, UnsupportedError

X = torch.ones(3)


class Polled:
    """A handle that can be asked and never tells; it is done after a number of questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0


def polled(questions: int) -> Pending:
    return Pending(lambda: X, polled=cast(dist.Work, cast(Any, Polled(questions))))


class Gate:
    """An item of a queue that ends when the gate is opened, well or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_open, self.error = threading.Event(), error

    def begin(self) -> bool:
        return True

    def finish(self, has_announced: Any) -> None:
        self.is_open.wait()
        if self.error is not None:
            raise self.error


def through(queue: WorkQueue, gate: Gate) -> Pending:
    transfer = queue.start(gate, is_async=True)

    def finish() -> torch.Tensor:
        transfer.wait()
        return X

    return Pending(finish, transfer)


def never() -> str | None:
    raise AssertionError("asked though the operation had ended")


def test_what_is_ready_has_ended_and_no_failure_counts() -> None:
    pending = Pending.ready(X)
    assert pending.is_done() is True
    assert pending.wait_or(never) is X


def test_where_nothing_tells_it_says_so_and_does_not_block() -> None:
    def finish() -> torch.Tensor:
        raise AssertionError("waited for")

    pending = Pending(finish)
    assert pending.is_done() is None
    assert pending.around(finish).is_done() is None
    with pytest.raises(UnsupportedError, match="neither the host nor a handle"):
        pending.wait_or(lambda: None)


def test_a_handle_of_a_device_is_asked_and_does_not_tell() -> None:
    pending = polled(1)
    assert pending.on_done(lambda: None) is False
    assert [pending.is_done(), pending.is_done()] == [False, True]
    asked: list[None] = []
    around = polled(2).around(lambda: X * 2)
    assert around.wait_or(lambda: asked.append(None)).tolist() == [2.0] * 3
    assert len(asked) == 2
    assert around.is_done() is True


@pytest.mark.parametrize("is_around", [False, True])
def test_in_a_queue_each_ends_for_itself_and_in_order(is_around: bool) -> None:
    queue, gates = WorkQueue(), [Gate(), Gate()]
    pending = [through(queue, gate) for gate in gates]
    if is_around:
        pending = [p.around(p.wait) for p in pending]
    gates[1].is_open.set()
    assert [p.is_done() for p in pending] == [False, False]

    def opens() -> None:
        # The wait polls, so it is this call that lets the operation end.
        gates[0].is_open.set()

    assert pending[1].wait_or(opens) is X
    assert [p.is_done() for p in pending] == [True, True]
    queue.rest()


def test_a_failure_leaves_the_operation_and_the_next_wait_still_works() -> None:
    queue, gate = WorkQueue(), Gate()
    pending = through(queue, gate)
    messages = iter([None, None, "rank 1: out of paper"])
    with pytest.raises(PeerError, match="rank 1: out of paper"):
        pending.wait_or(lambda: next(messages))
    assert pending.is_done() is False
    gate.is_open.set()
    assert pending.wait() is X
    queue.rest()


def test_an_error_of_the_operation_counts_before_the_failure() -> None:
    queue, gate = WorkQueue(), Gate(RuntimeError("connection reset"))
    pending = through(queue, gate)
    ended = threading.Event()
    assert pending.on_done(ended.set)
    gate.is_open.set()
    ended.wait()
    with pytest.raises(RuntimeError, match="connection reset"):
        # The end may be told a moment before it can be asked for.
        pending.wait_or(lambda: None)
    assert pending.is_done() is True
    with pytest.raises(RuntimeError, match="connection reset"):
        pending.wait_or(never)
    queue.rest()
