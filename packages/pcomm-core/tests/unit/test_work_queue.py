"""The queue behind gloo's large operations: who begins when, who hears of what, who fails."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.collectives.gloo_queue import Transfer, WorkQueue
from pcomm.core.testing.programs import wait_until

# Far beyond what anything here takes: a test that needs it has failed.
LIMIT_S = 120.0


class Signal(threading.Event):
    """An event for which nobody waits for ever."""

    def await_(self) -> None:
        assert self.wait(LIMIT_S), "it never came"


class Step:
    """An operation that writes down what happens to it, and goes on when it is told to.

    Args:
        name: What the log calls it.
        log: Shared by all operations of a test.
        announces_at_once: What `begin` returns.
        is_held: Whether it waits for `may_announce` and `may_end`.
        fails_in: The part that raises `problem`.
    """

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        announces_at_once: bool = True,
        is_held: bool = False,
        fails_in: str = "",
        problem: BaseException | None = None,
    ) -> None:
        self.name, self.log, self.announces_at_once = name, log, announces_at_once
        self.fails_in, self.problem = fails_in, problem or ValueError(f"{name} is broken")
        self.has_begun, self.is_finishing = Signal(), Signal()
        self.may_announce, self.may_end = Signal(), Signal()
        if not is_held:
            self.may_announce.set()
            self.may_end.set()
        self.thread = 0

    def begin(self) -> bool:
        self.log.append(f"begin {self.name}")
        self.has_begun.set()
        if self.fails_in == "begin":
            raise self.problem
        return self.announces_at_once

    def finish(self, has_announced: Callable[[], None]) -> None:
        self.thread = threading.get_ident()
        self.is_finishing.set()
        self.may_announce.await_()
        if not self.announces_at_once:
            self.log.append(f"announced {self.name}")
            has_announced()
        self.may_end.await_()
        if self.fails_in == "finish":
            raise self.problem
        self.log.append(f"end {self.name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def queue() -> WorkQueue:
    return WorkQueue()


def test_the_next_begins_as_soon_as_the_one_before_has_announced_and_not_before(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, announces_at_once=False, is_held=True)
    b = Step("b", log, announces_at_once=False, is_held=True)
    c = Step("c", log)
    first, second, third = (queue.start(step, is_async=True) for step in (a, b, c))
    a.is_finishing.await_()
    assert log == ["begin a"]
    a.may_announce.set()
    b.has_begun.await_()
    assert log == ["begin a", "announced a", "begin b"]
    assert not first.is_over
    # It may announce, but it is not its turn.
    b.may_announce.set()
    b.may_end.set()
    a.may_end.set()
    third.wait()
    assert first.is_over
    assert second.is_over
    assert log[3:] == ["end a", "announced b", "begin c", "end b", "end c"]


def test_what_announces_everything_lets_the_next_begin_in_the_same_call(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, is_held=True)
    b, c = Step("b", log, announces_at_once=False), Step("c", log)
    queue.start(a, is_async=True)
    queue.start(b, is_async=True)
    last = queue.start(c, is_async=True)
    # `b` begins at once, and `c` waits for what `b` announces when its turn has come.
    assert log == ["begin a", "begin b"]
    a.may_announce.set()
    a.may_end.set()
    last.wait()
    assert log[2:] == ["end a", "announced b", "begin c", "end b", "end c"]


@given(
    steps=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_any_row_of_operations_keeps_its_order(
    steps: list[tuple[bool, bool]], order: random.Random
) -> None:
    log: list[str] = []
    queue = WorkQueue()
    transfers = []
    for place, (announces_at_once, is_async) in enumerate(steps):
        step = Step(str(place), log, announces_at_once=announces_at_once)
        transfers.append(queue.start(step, is_async=is_async))
        if not is_async:
            assert all(transfer.is_over for transfer in transfers)
    order.shuffle(transfers)
    for transfer in transfers:
        transfer.wait()
    for what in ("begin", "end"):
        expected = [f"{what} {place}" for place in range(len(steps))]
        assert [line for line in log if line.startswith(what)] == expected
    for place, (announces_at_once, _) in enumerate(steps[:-1]):
        if not announces_at_once:
            begin = log.index(f"begin {place + 1}")
            assert log.index(f"announced {place}") < begin
            assert place == 0 or log.index(f"end {place - 1}") < begin


def test_the_end_is_told_before_wait_returns_and_at_once_to_whoever_asks_late(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, is_held=True)
    transfer = queue.start(a, is_async=True)

    def broken() -> None:
        raise ValueError("what a call raises is lost")

    assert transfer.on_done(broken)
    assert transfer.on_done(lambda: log.append(f"told, {transfer.is_over=}"))
    assert log == ["begin a"]
    a.may_announce.set()
    a.may_end.set()
    transfer.wait()
    assert log == ["begin a", "end a", "told, transfer.is_over=False"]
    assert transfer.on_done(lambda: log.append("told late"))
    assert log[3:] == ["told late"]


def test_an_operation_is_free_by_the_time_that_its_end_is_told(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, is_held=True)
    may_announce, may_end, memory = a.may_announce, a.may_end, weakref.ref(a)
    transfer = queue.start(a, is_async=True)
    del a
    assert memory() is not None
    is_free: list[bool] = []
    transfer.on_done(lambda: is_free.append(memory() is None))
    may_announce.set()
    may_end.set()
    transfer.wait()
    assert is_free == [True]


def test_nobody_has_to_keep_an_operation_that_is_on_its_way(log: list[str]) -> None:
    """Whoever started it may forget it, and the queue: its memory stays until its end."""
    queue, a = WorkQueue(), Step("a", log, is_held=True)
    may_announce, may_end, memory, thread = a.may_announce, a.may_end, weakref.ref(a), Signal()
    queue.start(a, is_async=True).on_done(thread.set)
    del a, queue
    gc.collect()
    assert memory() is not None
    may_announce.set()
    may_end.set()
    thread.await_()
    assert log == ["begin a", "end a"]


@pytest.mark.parametrize("is_async", [True, False])
def test_an_error_at_the_end_fails_all_later_operations_and_they_are_not_begun(
    queue: WorkQueue, log: list[str], is_async: bool
) -> None:
    a = Step("a", log, announces_at_once=False, is_held=True, fails_in="finish")
    first = queue.start(a, is_async=True)
    second = queue.start(Step("b", log), is_async=True)
    told = Signal()
    first.on_done(told.set)
    a.may_announce.set()
    a.may_end.set()
    told.await_()
    with pytest.raises(ValueError, match="a is broken"):
        first.wait()
    # Waiting once more does not make it better.
    with pytest.raises(ValueError, match="a is broken"):
        first.wait()
    # It had begun, and nobody knows what came of it.
    with pytest.raises(RuntimeError, match="before this one failed with ValueError: a is broken"):
        second.wait()
    with pytest.raises(RuntimeError, match="a is broken"):
        queue.start(Step("c", log), is_async=is_async).wait()
    assert log == ["begin a", "announced a", "begin b"]


@pytest.mark.parametrize("is_async", [True, False])
def test_an_error_at_the_beginning_fails_later_operations_and_none_before_it(
    queue: WorkQueue, log: list[str], is_async: bool
) -> None:
    a = Step("a", log, is_held=True)
    first = queue.start(a, is_async=True)
    second = queue.start(Step("b", log, fails_in="begin"), is_async=True)
    third = queue.start(Step("c", log), is_async=True)
    a.may_announce.set()
    a.may_end.set()
    with pytest.raises(ValueError, match="b is broken"):
        second.wait()
    first.wait()
    with pytest.raises(RuntimeError, match="b is broken"):
        third.wait()
    with pytest.raises(RuntimeError, match="b is broken"):
        queue.start(Step("d", log), is_async=is_async).wait()
    assert log == ["begin a", "begin b", "end a"]


def test_an_error_at_the_beginning_that_another_announced_is_not_lost(
    queue: WorkQueue, log: list[str]
) -> None:
    """It is raised where the operation is waited for, and not in the one that made room for it."""
    a = Step("a", log, announces_at_once=False, is_held=True)
    first = queue.start(a, is_async=True)
    second = queue.start(Step("b", log, fails_in="begin"), is_async=True)
    a.may_announce.set()
    a.may_end.set()
    first.wait()
    with pytest.raises(ValueError, match="b is broken"):
        second.wait()


def test_what_failed_keeps_its_memory_as_long_as_the_queue_is_there(log: list[str]) -> None:
    before = set(threading.enumerate())
    queue = WorkQueue()
    a = Step("a", log, is_held=True, fails_in="finish")
    b = Step("b", log)
    broken, begun = weakref.ref(a), weakref.ref(b)
    may_announce, may_end = a.may_announce, a.may_end
    transfers = [queue.start(step, is_async=True) for step in (a, b)]
    del a, b
    may_announce.set()
    may_end.set()
    for transfer in transfers:
        with pytest.raises((ValueError, RuntimeError)):
            transfer.wait()
    # What was never begun has nothing on its way.
    c = Step("c", log)
    refused = weakref.ref(c)
    transfer = queue.start(c, is_async=True)
    with pytest.raises(RuntimeError, match="before this one failed"):
        transfer.wait()
    del transfer, transfers, c
    gc.collect()
    assert refused() is None
    assert broken() is not None
    assert begun() is not None
    (thread,) = set(threading.enumerate()) - before
    del queue
    gc.collect()  # an error and the frames that it came through hold each other
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert broken() is None
    assert begun() is None


def test_what_is_abandoned_in_flight_ends_with_an_error_while_its_memory_is_kept(
    queue: WorkQueue, log: list[str]
) -> None:
    held, begun = Step("held", log, is_held=True), Step("begun", log, announces_at_once=False)
    transfers = [queue.start(step, is_async=True) for step in (held, begun, Step("never", log))]
    held.is_finishing.await_()
    told: list[int] = []
    transfers[1].on_done(lambda: told.append(1))
    queue.abandon(lambda: ConnectionError("abandoned"))
    for transfer in transfers:
        with pytest.raises(ConnectionError, match="abandoned"):
            transfer.wait()
    assert told == [1]
    # What has begun may still be read and written; the thread is with the first one.
    memory = weakref.ref(begun)
    del begun
    gc.collect()
    assert memory() is not None
    held.may_announce.set()
    held.may_end.set()
    with pytest.raises(RuntimeError, match="abandoned"):
        queue.start(Step("late", log), is_async=False)
    wait_until(lambda: len(log) > 2, "the end of the first one")
    assert log == ["begin held", "begin begun", "end held"]
    # The first end counts, and told once.
    with pytest.raises(ConnectionError, match="abandoned"):
        transfers[0].wait()
    assert told == [1]
    queue.forget()
    wait_until(lambda: memory() is None, "the end of what was abandoned")


def test_a_collection_within_a_failure_may_drop_the_memory(log: list[str]) -> None:
    queue = WorkQueue()

    class Collects(Exception):
        def __str__(self) -> str:
            # The finalizer of the process group, wherever a collection of cycles comes.
            queue.forget()
            return "gone"

    step = Step("a", log, fails_in="finish", problem=Collects())
    transfer, ended = queue.start(step, is_async=True), Signal()
    transfer.on_done(ended.set)
    ended.await_()
    with pytest.raises(Collects):
        transfer.wait()


def test_a_blocking_operation_runs_here_when_nothing_is_on_its_way(
    queue: WorkQueue, log: list[str]
) -> None:
    here = threading.get_ident()
    a, b = Step("a", log, announces_at_once=False), Step("b", log)
    assert queue.start(a, is_async=False).is_over
    assert a.thread == here
    queue.start(b, is_async=True).wait()
    assert b.thread not in (0, here)
    # What was on its way has ended, so the next one runs here again.
    c = Step("c", log)
    queue.start(c, is_async=False)
    assert c.thread == here


def test_a_blocking_operation_waits_behind_what_is_on_its_way(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, announces_at_once=False, is_held=True)
    b = Step("b", log)
    queue.start(a, is_async=True)
    a.may_announce.set()

    def let_go() -> None:
        # By then it has been seen that `a` is on its way.
        b.has_begun.await_()
        a.may_end.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    assert queue.start(b, is_async=False).is_over
    helper.join()
    assert b.thread == a.thread != threading.get_ident()
    assert log == ["begin a", "announced a", "begin b", "end a", "end b"]


def test_an_interrupt_in_a_blocking_operation_is_raised_and_fails_the_others(
    queue: WorkQueue, log: list[str]
) -> None:
    a = Step("a", log, announces_at_once=False, fails_in="finish", problem=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        queue.start(a, is_async=False)
    # Nobody pressed anything now.
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        queue.start(Step("b", log), is_async=False)
    assert log == ["begin a", "announced a"]


@pytest.mark.parametrize(
    ("line", "is_async"),
    [("_finish", False), ("_finish_later", True), ("_begin_next", False), ("_begin_next", True)],
)
def test_an_interrupt_between_two_lines_leaves_nothing_that_looks_like_a_result(
    queue: WorkQueue,
    log: list[str],
    line: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operation that has begun and is never finished; the next must not end unbegun."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue, line, interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.start(Step("a", log, announces_at_once=False), is_async=is_async)
    for later in (False, True):
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            queue.start(Step("b", log), is_async=later).wait()
    assert log == ([] if line == "_begin_next" else ["begin a"])


def test_the_thread_ends_when_the_queue_has_gone(log: list[str]) -> None:
    before = set(threading.enumerate())
    queue = WorkQueue()
    for name in "ab":
        queue.start(Step(name, log), is_async=True)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon, "a peer that never answers would keep the process from ending"
    # Without the collector of cycles, whose time nobody knows.
    gc.disable()
    try:
        del queue
        thread.join(LIMIT_S)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert log[-1] == "end b"


def test_no_thread_is_made_for_those_who_wait(log: list[str]) -> None:
    before = set(threading.enumerate())
    queue = WorkQueue()
    transfer: Transfer = queue.start(Step("a", log), is_async=False)
    assert transfer.is_over
    assert not set(threading.enumerate()) - before
