"""When a loop of steps starts the ranks of its engine again, how long it waits, and when not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pcomm.core.errors import ClosedError, PeerError
from pcomm.core.testing.programs import wait_until
from pcomm.inference import Request, RequestOutput, SamplingParams
from pcomm.integration.serve.step_loop import StepLoop

REQUEST = Request("one", (1, 2), SamplingParams())


def died(rank: int) -> PeerError:
    return PeerError("step", found=f"rank {rank} died", why="It is gone.", fix="Start again.")


class Ranks:
    """An engine whose steps fail once its ranks are dead, and whose restarts fail as told."""

    def __init__(self, failures: Sequence[int]) -> None:
        # Restarts that fail before the one that does not, for each death in turn.
        self.failures = list(failures)
        self.failure, self.has_work, self.is_closed = "", False, False
        self.loads, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def add(self, request: Request) -> None:
        self.has_work = True

    def abort(self, request_id: str) -> bool:
        return True

    def step(self) -> list[RequestOutput]:
        if self.failure:
            raise died(1)
        return []

    def restart(self) -> None:
        self.loads.set()
        self.goes_on.wait()
        if self.is_closed:
            raise ClosedError("restart", found="a closed engine", why="It is closed.", fix="None.")
        if self.failures and self.failures[0]:
            self.failures[0] -= 1
            raise died(0)
        del self.failures[:1]
        self.failure, self.has_work = "", False

    def close(self) -> None:
        self.is_closed = True
        self.goes_on.set()


class Time:
    """A clock that a test moves on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(ranks: Ranks, restarts: int, pauses: list[float], clock: Time) -> tuple[StepLoop, Any]:
    """A loop whose pauses are noted and not waited for, and what it has delivered."""
    delivered: list[RequestOutput] = []
    loop = StepLoop(ranks, delivered.extend, clock=clock, restarts=restarts, restart_pause_s=1.0)
    wait = loop._ends.wait

    def noted(seconds: float) -> bool:
        pauses.append(seconds)
        return wait(0)

    loop._ends.wait = noted  # type: ignore[method-assign]
    loop.start()
    return loop, delivered


@pytest.mark.parametrize(
    ("restarts", "failures", "pauses", "is_lost"),
    [
        (0, [0], [], True),
        (1, [0], [0], False),
        (2, [1], [0, 1], False),
        (2, [2], [0, 1], True),
        # A pause is never longer than half a minute.
        (9, [8], [0, 1, 2, 4, 8, 16, 30, 30, 30], False),
        (3000, [2999], [0, 1, 2, 4, 8, 16, *[30] * 2994], False),
    ],
)
def test_each_restart_of_a_series_waits_twice_as_long(restarts, failures, pauses, is_lost):
    ranks, found = Ranks(failures), list[float]()
    loop, delivered = begun(ranks, restarts, found, Time())
    loop.submit([REQUEST]).result()
    ranks.failure = "rank 1 died"
    wait_until(lambda: delivered, "the end of the request")
    assert [(one.request_id, one.finish_reason) for one in delivered] == [("one", "error")]
    assert isinstance(delivered[0].error, PeerError)
    wait_until(lambda: loop.is_lost if is_lost else loop.is_alive, "the last restart")
    assert (found, loop.num_restarts) == (pauses, len(pauses))
    if is_lost:
        assert loop.reason == ("rank 0 died" if restarts else "rank 1 died")
        with pytest.raises(ClosedError, match="a model that has failed"):
            loop.submit([REQUEST]).result()
    else:
        assert loop.reason == ""
        loop.submit([REQUEST]).result()
    assert loop.close(10)


def test_ranks_that_lived_for_a_minute_begin_a_new_series():
    ranks, pauses, clock = Ranks([]), list[float](), Time()
    loop, _ = begun(ranks, 4, pauses, clock)
    # The loop is idle: that a rank has died is found without a request.
    for lived_s in (0.0, 60.0, 60.1, 0.0):
        clock.now += lived_s
        number = loop.num_restarts
        ranks.failure = "rank 1 died"
        wait_until(lambda n=number: loop.num_restarts > n and loop.is_alive, "a restart")
    assert pauses == [0, 1, 0, 1]
    ranks.failure = "rank 1 died"
    wait_until(lambda: loop.is_lost, "the end")
    assert loop.close(10)


def test_a_loop_that_is_closed_cuts_a_restart_short_and_says_meanwhile_what_is_done():
    ranks = Ranks([])
    loop, _ = begun(ranks, 3, [], Time())
    ranks.goes_on.clear()
    ranks.failure = "rank 1 died"
    wait_until(ranks.loads.is_set, "a restart")
    assert loop.is_restarting
    assert not loop.is_lost
    assert not loop.is_alive
    assert loop.reason == "rank 1 died; restart 1 of 3"
    with pytest.raises(ClosedError, match="a model that has failed"):
        loop.submit([REQUEST]).result()
    assert loop.close(10)
    assert ranks.is_closed
    # The end was asked for: nothing is lost by the failure.
    assert not loop.is_lost
