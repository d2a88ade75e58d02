"""Ctrl-C and second threads while streams of an `LLM` are read, on one rank and on two."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.errors import UnsupportedError
from pcomm.core.process import local_ranks as rank_session
from pcomm.core.process import signals as interrupts
from pcomm.inference import SamplingParams
from pcomm.inference.engine import engine as engine_module
from pcomm.integration.llm import LLM, engine_on_ranks, open_requests
from pcomm.integration.llm import llm as llm_module

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("run"), "A", "model.kv_heads=2")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def llm(request: pytest.FixtureRequest, run: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 96, "memory_bytes": 2**21, "max_requests": 3}
    with LLM(run, ranks=request.param, **options) as found:
        yield found


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def is_idle(llm: LLM) -> bool:
    """Whether no memory belongs to a request."""
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.blocks.used) == (0, 0, 0)


class CtrlC:
    """A profile function: SIGINT at the n-th place in the files of an `LLM` that looks for signals.

    Python does so where a function begins and where one that is not Python returns.
    """

    FILES = frozenset(
        module.__file__
        for module in (
            llm_module,
            open_requests,
            engine_on_ranks,
            rank_session,
            interrupts,
            engine_module,
        )
    )

    def __init__(self, place: int) -> None:
        self.left = place

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event not in ("call", "c_return"):
            return
        if frame.f_code.co_filename == contextlib.__file__:
            # What enters and leaves their context managers.
            frame = frame.f_back
        if frame.f_code.co_filename in self.FILES:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)


# Some of the places, for time; two ranks have more of them.
SOME, MORE = (3, 11), pytest.param((2, 5), id="more", marks=pytest.mark.soak)


@pytest.mark.parametrize("strides", [pytest.param(SOME, id="some"), MORE])
@pytest.mark.parametrize("begins", [False, True], ids=["goes on", "begins"])
def test_a_ctrl_c_at_any_call_costs_another_stream_no_token_and_repeats_none(begins, strides, llm):
    (expected,) = llm.generate("word2", SHORT)
    num_interrupts = 0
    stride = strides[llm._on_ranks is not None]
    for place in range(1, 10**4, stride):
        other, mine = llm.stream("word2", SHORT), llm.stream("word1", LONG)
        tokens = [*next(other).token_ids]
        if not begins:
            next(mine)
        ctrl_c, was_interrupted = CtrlC(place), False
        sys.setprofile(ctrl_c)
        try:
            next(mine)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        mine.close()
        tokens += [token for delta in other for token in delta.token_ids]
        assert (place, tuple(tokens)) == (place, expected.token_ids)
        assert is_idle(llm)
        assert was_interrupted == (ctrl_c.left <= 0)
        if not was_interrupted:
            break
        num_interrupts += 1
    assert num_interrupts > 5


def test_a_ctrl_c_within_generate_leaves_the_llm_as_it_was(llm):
    expected = [one.token_ids for one in llm.generate(["word1", "word2"], SHORT)]
    num_interrupts = 0
    for place in range(1, 10**4, 41):
        ctrl_c = CtrlC(place)
        sys.setprofile(ctrl_c)
        try:
            found = llm.generate(["word1", "word2"], SHORT)
        except KeyboardInterrupt:
            num_interrupts += 1
            found = llm.generate(["word1", "word2"], SHORT)
        finally:
            sys.setprofile(None)
        assert (place, [one.token_ids for one in found]) == (place, expected)
        assert is_idle(llm)
        if ctrl_c.left > 0:
            break
    assert num_interrupts > 5


def test_outputs_that_an_interrupt_keeps_from_their_streams_come_with_the_next_step(
    llm, monkeypatch
):
    (expected,) = llm.generate("word2", GREEDY)
    first, second = llm.stream("word1", LONG), llm.stream("word2", GREEDY)
    tokens = [*next(second).token_ids]
    next(first)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(open_requests, "deferred_interrupt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    tokens += [token for delta in second for token in delta.token_ids]
    assert tuple(tokens) == expected.token_ids
    assert is_idle(llm)


def test_a_second_thread_is_refused_and_the_first_one_goes_on(llm, monkeypatch):
    (expected,) = llm.generate("word1", GREEDY)
    dropped = llm.stream("word2", LONG)
    next(dropped)
    refused: list[str] = []

    def intrude() -> None:
        for call in (llm.stats, lambda: llm.generate("word3", GREEDY)):
            try:
                call()
            except UnsupportedError as error:
                refused.append(error.found)
        # A stream that ends in another thread, as one may that is collected as garbage.
        dropped.close()

    step = llm.engine.step

    def with_intruder() -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return step()

    monkeypatch.setattr(llm.engine, "step", with_intruder)
    assert llm.generate("word1", GREEDY)[0].token_ids == expected.token_ids
    assert refused == ["a call under way in thread 'MainThread'"] * 2
    assert is_idle(llm)
    if llm._on_ranks is None:
        return
    # The engine by itself, too: its messages and answers belong together.
    wait = rank_session.connection.wait
    refused.clear()

    def intrude_on_engine() -> None:
        try:
            llm.engine.stats()
        except UnsupportedError as error:
            refused.append(error.found)

    def waiting(*arguments: Any) -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=intrude_on_engine)
        thread.start()
        thread.join()
        return wait(*arguments)

    monkeypatch.setattr(rank_session.connection, "wait", waiting)
    assert llm.generate("word1", GREEDY)[0].token_ids == expected.token_ids
    assert refused == ["a call under way in thread 'MainThread'"]
