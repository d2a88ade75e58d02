"""Sessions on local ranks: messages, answers, and the loss of a rank while others wait for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pcomm.core.process import Answer, LocalRanks, RankError, RankSession
from pcomm.core.process import local_ranks as module
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import wait_until

SOURCE = """
import os, signal, threading, torch
import torch.distributed as dist
rank = dist.get_rank()

def add(x):
    t = torch.tensor([float(x)])
    dist.all_reduce(t)
    return float(t)

messages.answer(os.getpid())
for text in messages:
    try:
        value, error = eval(text), None
    except ValueError as caught:
        value, error = None, caught
    messages.answer(value, error)
"""


class Loop:
    """A task that evaluates its messages; test modules cannot be imported by ranks."""

    def __init__(self, source: str = SOURCE) -> None:
        self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"lambda messages: exec({self.source!r}, {{'messages': messages}})",)

    def __call__(self) -> None: ...


@pytest.fixture(scope="module")
def shared() -> Iterator[list[LocalRanks]]:
    """Two ranks for all tests; one that loses them puts none back."""
    kept: list[LocalRanks] = []
    yield kept
    for ranks in kept:
        ranks.close()


@pytest.fixture
def ranks(shared: list[LocalRanks]) -> Iterator[LocalRanks]:
    if not shared or not shared[0].is_usable:
        shared[:] = [LocalRanks(2)]
    return shared[0]


@pytest.fixture
def session(ranks: LocalRanks) -> Iterator[RankSession]:
    opened = ranks.open(Loop())
    opened.answers()
    yield opened
    opened.close()


def values(answers: list[Answer]) -> list[Any]:
    assert [answer.error for answer in answers] == [None, None]
    return [answer.value for answer in answers]


def test_all_ranks_get_each_message_and_answer_in_rank_order(session: RankSession) -> None:
    assert values(session.ask("add(rank + 1)")) == [3.0, 3.0]
    for n in range(20):
        assert values(session.ask(f"(rank, {n})")) == [(0, n), (1, n)]
    assert session.failure == ""


def test_the_ranks_of_a_closed_session_can_be_used_again(ranks: LocalRanks) -> None:
    # What earlier tests left in cycles has open files, too.
    gc.collect()
    before, count = Living.now(), len(os.listdir("/proc/self/fd"))
    for n in range(2):
        session = ranks.open(Loop())
        pids = values(session.answers())
        assert values(session.ask(f"add({n})")) == [2.0 * n] * 2
        session.close()
        session.close()
        with pytest.raises(RankError, match="closed"):
            session.ask("1")
        assert ranks.run(eval, ("__import__('os').getpid()",)) == pids
    assert Living.now().beyond(before) == []
    assert len(os.listdir("/proc/self/fd")) <= count


def test_an_error_of_all_ranks_is_survived(session: RankSession) -> None:
    answers = session.ask("int('x' * (rank + 1))")
    assert [str(answer.error) for answer in answers] == [
        "invalid literal for int() with base 10: 'x'",
        "invalid literal for int() with base 10: 'xx'",
    ]
    assert values(session.ask("add(1)")) == [2.0, 2.0]


def test_an_error_that_cannot_travel_comes_as_its_words(session: RankSession) -> None:
    answers = session.ask("(_ for _ in ()).throw(ValueError('no pickle', lambda: 0))")
    for answer in answers:
        assert isinstance(answer.error, RuntimeError)
        assert "ValueError: ('no pickle'" in str(answer.error)


def test_a_rank_that_fails_alone_ends_the_session_although_the_other_waits_for_it(
    session: RankSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_GRACE_S", 0.3)
    with pytest.raises(RankError) as caught:
        session.ask("int('x') if rank else add(1)")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 1 of 2 failed alone: ValueError: invalid literal")
    assert lines[1] == "rank 0: still running, stopped at"
    assert any("in add" in line for line in lines)
    assert isinstance(caught.value.error, ValueError)
    assert session.failure == lines[0]
    with pytest.raises(RankError, match="rank 1 of 2 failed alone"):
        session.ask("1")


def test_a_rank_that_is_killed_ends_a_collective_of_the_others(session: RankSession) -> None:
    with pytest.raises(RankError) as caught:
        session.ask("os.kill(os.getpid(), signal.SIGKILL) if rank else add(1)")
    assert str(caught.value) == "rank 1 of 2 died: killed by SIGKILL"


def test_a_rank_that_is_killed_between_two_messages_is_seen_at_once(ranks: LocalRanks) -> None:
    session = ranks.open(Loop())
    pids = values(session.answers())
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: session.failure == "rank 1 of 2 died", "the end of rank 1")
    with pytest.raises(RankError, match=r"rank 1 of 2 died: killed by SIGKILL"):
        session.ask("1")
    session.close()
    assert not ranks.is_usable


def test_a_task_that_raises_is_told_with_its_traceback(ranks: LocalRanks) -> None:
    session = ranks.open(Loop("def find_it():\n    raise KeyError('no key')\nfind_it()"))
    with pytest.raises(RankError, match=r"rank [01] of 2 failed: KeyError: 'no key'\n") as caught:
        session.answers()
    assert "in find_it" in str(caught.value)
    assert isinstance(caught.value.error, KeyError)


def test_ranks_that_do_not_answer_in_time_are_stopped(session: RankSession) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not answer in time") as caught:
        session.ask("threading.Event().wait() if rank else 1", 0.2)
    assert "rank 1: still running" in str(caught.value)


def test_an_interrupt_while_it_waits_loses_no_answer(
    session: RankSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = module.connection.wait

    def interrupted(*_: object) -> list[Any]:
        monkeypatch.setattr(module.connection, "wait", wait)
        raise KeyboardInterrupt

    session.send("rank + 5")
    monkeypatch.setattr(module.connection, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.answers()
    assert values(session.answers()) == values(session.answers()) == [5, 6]


def test_an_interrupt_within_a_message_is_an_error_from_then_on(
    session: RankSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(session._ranks._connections[1]), "send_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.send("1")
    monkeypatch.undo()
    # At once, and not with the next call.
    assert session.failure.startswith("send was cut short by KeyboardInterrupt")
    with pytest.raises(RankError, match="cut short by KeyboardInterrupt"):
        session.answers()


@pytest.mark.parametrize("method", ["send_bytes", "recv"])
def test_a_ctrl_c_within_a_message_comes_after_it(
    method: str, session: RankSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(session._ranks._connections[1])
    plain, calls = getattr(kind, method), [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*arguments)

    before = session.num_sent
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(kind, method, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.ask("rank + 5")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert session.num_sent == before + 1
    assert values(session.answers()) == [5, 6]
    assert values(session.ask("add(1)")) == [2.0, 2.0]


def test_lost_ranks_leave_no_file_open_while_their_errors_are_kept(ranks: LocalRanks) -> None:
    gc.collect()
    count, errors = len(os.listdir("/proc/self/fd")), []
    for _ in range(2):
        with LocalRanks(2) as lost:
            session = lost.open(Loop())
            pids = values(session.answers())
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(RankError) as caught:
                session.ask("1")
            session.close()
        errors.append((caught.value, lost))
    assert len(os.listdir("/proc/self/fd")) <= count


def test_requests_to_stop_are_for_the_process_that_sends_the_messages(session: RankSession) -> None:
    source = "[os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)]"
    assert values(session.ask(source)) == [[None, None]] * 2
    assert values(session.ask("add(1)")) == [2.0, 2.0]


def test_a_program_needs_no_guard_around_ranks_that_do_not_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('the program runs again')\n")
    main = ModuleType("__main__")
    main.__file__ = str(program)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with LocalRanks(1, imports_main=False) as ranks:
        assert ranks.run(eval, ("7 * 6",)) == [42]
        assert sys.modules["__main__"] is main
    # Otherwise it would, as tasks of the program's file need it.
    with LocalRanks(1) as ranks, pytest.raises(RankError, match="exit code 1"):
        ranks.run(eval, ("1",))
