"""`deferred_interrupt`: real signals, which this process sends to itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pcomm.core.process import deferred_interrupt


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_comes_after_the_outermost_block() -> None:
    done = []

    def nested() -> None:
        with deferred_interrupt():
            with deferred_interrupt():
                interrupt()
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["inner", "outer"]


def test_a_second_ctrl_c_ends_a_block_that_hangs() -> None:
    done = []

    def hanging() -> None:
        with deferred_interrupt(), deferred_interrupt():
            interrupt()
            done.append("first")
            interrupt()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        hanging()
    assert done == ["first"]


@pytest.mark.parametrize("comes", ["before", "within", "after"])
def test_a_call_that_hears_signals_is_cut_short_and_the_rest_is_not(comes: str) -> None:
    done = []

    def call() -> None:
        done.append("call")
        if comes == "within":
            interrupt()
            done.append("went on")

    def block() -> None:
        with deferred_interrupt() as deferral:
            if comes == "before":
                interrupt()
            done.append("before")
            try:
                deferral.heard(call)
            finally:
                if comes == "after":
                    interrupt()
                done.append("after")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["before", *(["call"] if comes != "before" else []), "after"]


def test_a_call_hears_nothing_within_another_block() -> None:
    done = []

    def nested() -> None:
        with deferred_interrupt(), deferred_interrupt() as deferral:
            deferral.heard(interrupt)
            done.append("inner")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["inner"]


def test_an_error_of_the_block_does_not_take_the_ctrl_c_with_it() -> None:
    def failing() -> None:
        with deferred_interrupt():
            interrupt()
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        failing()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_signal_that_is_ignored_and_other_threads_stay_as_they_are() -> None:
    found = []

    def enter() -> None:
        with deferred_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert found == [signal.default_int_handler, signal.SIG_IGN]
