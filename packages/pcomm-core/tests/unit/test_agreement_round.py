"""A round of agreement, and steps that are done on all ranks or undone on all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pcomm.core.control.agreement_round import AgreementRound, all_or_none
from pcomm.core.errors import ConfigError, FencedError, PeerError


@pytest.mark.parametrize("is_said", [True, False])
def test_what_was_said_before_the_next_generation_began_is_heard(is_said: bool) -> None:
    """A rank may read the text and begin the next generation between two looks of another one."""
    store, looks = dist.HashStore(), 0

    def check_fence() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            if is_said:
                round_.say("lines", "the same")
            raise FencedError("test", found="a generation", why="it has begun", fix="enter it")

    round_ = AgreementRound(
        store, "prefix", "topic", 0, (0, 1), timeout_s=3600.0, check_fence=check_fence
    )
    if is_said:
        assert round_.hear("lines") == "the same"
    else:
        with pytest.raises(FencedError):
            round_.hear("lines")
    assert looks == 2


def mistake(kind: type[ConfigError | PeerError] = ConfigError) -> ConfigError | PeerError:
    return kind("test", found="nothing", why="Because.", fix="Do not.")


class Step:
    """What is called, in order, with what it got."""

    def __init__(self, fails: BaseException | None = None, peer: Exception | None = None) -> None:
        self.calls: list[object] = []
        self._fails, self._peer = fails, peer

    def do(self) -> str:
        self.calls.append("do")
        if self._fails is not None:
            raise self._fails
        return "done"

    def agree(self, result: str | None, error: Exception | None) -> int:
        self.calls.append(("agree", result, error))
        if error or self._peer:
            raise error or self._peer  # type: ignore[misc]
        return 3

    def undo(self, error: Exception | None) -> list[Exception]:
        self.calls.append(("undo", error))
        return [mistake()]

    def run(self) -> tuple[str, int]:
        return all_or_none(self.do, self.agree, self.undo)


def test_what_all_ranks_did_stays() -> None:
    step = Step()
    assert step.run() == ("done", 3)
    assert step.calls == ["do", ("agree", "done", None)]


def test_what_fails_here_is_told_and_undone() -> None:
    error = mistake()
    step = Step(fails=error)
    with pytest.raises(ConfigError) as caught:
        step.run()
    assert caught.value is error
    assert step.calls == ["do", ("agree", None, error), ("undo", error)]
    # What cannot be undone is told with it.
    assert [note.splitlines()[0] for note in error.__notes__] == ["test: nothing"]


def test_what_fails_elsewhere_is_undone_here() -> None:
    step = Step(peer=mistake(PeerError))
    with pytest.raises(PeerError):
        step.run()
    assert step.calls == ["do", ("agree", "done", None), ("undo", None)]


def test_an_interrupt_undoes_and_asks_nobody() -> None:
    step = Step(fails=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        step.run()
    assert step.calls == ["do", ("undo", None)]
