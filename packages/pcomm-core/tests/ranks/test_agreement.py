"""Agreement through a store: everybody gets the same verdict, whoever made the mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from pcomm.core.control.control import Control
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)
from pcomm.core.testing.on_ranks import ranks

WAIT_S = 120.0
SHORT_S = 0.3


def mistake(text: str = "the value 3") -> ConfigError:
    return ConfigError("train.steps", found=text, why="It is odd.", fix="Use 4.")


def store_of_job() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def verdicts(
    call: Callable[[dist.Store, int], object], callers: Sequence[int]
) -> dict[int, object]:
    """What `call` returns or raises on each rank, with ranks as threads around one store."""
    store = dist.HashStore()
    found: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = call(store, rank)
        except PcommError as problem:
            found[rank] = problem

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@ranks(3)
def test_without_an_error_nobody_raises(rank: int) -> None:
    for _ in range(3):
        Control(store_of_job(), range(3), rank, timeout_s=WAIT_S).fail_together("check", None)


@ranks(3)
def test_the_rank_with_the_error_raises_its_own_and_the_others_repeat_it(rank: int) -> None:
    error = mistake() if rank == 1 else None
    with pytest.raises(PcommError) as caught:
        Control(store_of_job(), range(3), rank, timeout_s=WAIT_S).fail_together("reading", error)
    if rank == 1:
        assert caught.value is error
    else:
        assert type(caught.value) is PeerError
        text = str(caught.value)
        assert text.startswith("reading: an error on rank 1: ConfigError: train.steps: the value 3")
        assert "Use 4." in text
        assert f"Rank {rank} is fine" in text


@ranks(3)
def test_a_call_after_a_failed_one_is_a_new_one(rank: int) -> None:
    error = mistake() if rank == 0 else None
    with pytest.raises(PcommError):
        Control(store_of_job(), range(3), rank, timeout_s=WAIT_S).fail_together("check", error)
    Control(store_of_job(), range(3), rank, timeout_s=WAIT_S).fail_together("check", None)


def test_several_errors_leave_each_rank_with_its_own() -> None:
    def call(store: dist.Store, rank: int) -> None:
        error = mistake(f"the value {rank}") if rank < 2 else None
        Control(store, range(3), rank, timeout_s=WAIT_S).fail_together("check", error)

    found = verdicts(call, range(3))
    assert [str(found[r]).splitlines()[0] for r in range(2)] == [
        "train.steps: the value 0",
        "train.steps: the value 1",
    ]
    assert isinstance(found[2], PeerError)


def test_alone_nothing_is_exchanged() -> None:
    Control(None, range(1), 0, timeout_s=SHORT_S).fail_together("check", None)
    with pytest.raises(ConfigError, match="the value 3"):
        Control(None, range(1), 0, timeout_s=SHORT_S).fail_together("check", mistake())


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    first, second = (rank for rank in range(3) if rank != absent)

    def limit_s(store: dist.Store, topic: str, rank: int) -> float:
        """A long time, and a short one for the second rank, once the first one is there."""
        if rank == first:
            return WAIT_S
        while not store.check([f"pcomm/0/0-2/{topic}/at/{first}"]):
            threading.Event().wait(0.001)
        return SHORT_S

    def fail(store: dist.Store, rank: int) -> None:
        limit = limit_s(store, "check", rank)
        Control(store, range(3), rank, timeout_s=limit).fail_together("check", None)

    def agree(store: dist.Store, rank: int) -> None:
        limit = limit_s(store, "plan", rank)
        Control(store, range(3), rank, timeout_s=limit).agree("plan", ["a"])

    for call in (fail, agree):
        for problem in verdicts(call, (first, second)).values():
            assert isinstance(problem, PeerTimeoutError)
            assert f"ranks [{absent}] of 3 did not arrive within 0.3 s" in str(problem)
            assert "PCOMM_TIMEOUT_S" in problem.fix


def test_who_has_an_error_keeps_it_when_another_rank_never_comes() -> None:
    def call(store: dist.Store, rank: int) -> None:
        Control(store, range(2), rank, timeout_s=SHORT_S).fail_together("check", mistake())

    assert isinstance(verdicts(call, [0])[0], ConfigError)


def test_a_late_rank_does_not_go_on_alone() -> None:
    """Once a rank has given up, the one that comes later meets it in its next call or in none."""
    store = dist.HashStore()
    with pytest.raises(PeerTimeoutError):
        Control(store, range(2), 0, timeout_s=SHORT_S).fail_together("check", None)
    words = (
        r"ranks \[0\] of 2 did not arrive within 0\.2 s; of the call before, "
        r"ranks \[1\] of 2 did not arrive within 0\.3 s"
    )
    with pytest.raises(PeerTimeoutError, match=words):
        Control(store, range(2), 1, timeout_s=0.2).fail_together("check", None)


@ranks(3)
def test_ranks_that_agree_get_one_new_name_for_it(rank: int) -> None:
    store = store_of_job()
    names = []
    for _ in range(2):
        name = Control(store, range(3), rank, timeout_s=WAIT_S).agree("plan", ["a", "b"])
        store.set(f"name of {rank}", name)
        Control(store, range(3), rank, timeout_s=WAIT_S).fail_together("written", None)
        assert {store.get(f"name of {r}").decode() for r in range(3)} == {name}
        Control(store, range(3), rank, timeout_s=WAIT_S).fail_together("read", None)
        names.append(name)
    assert names[0] != names[1]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_difference_is_told_to_every_rank(odd: int) -> None:
    def call(store: dist.Store, rank: int) -> None:
        lines = ["same", "other" if rank == odd else "usual", "tail"]
        Control(store, range(3), rank, timeout_s=WAIT_S).agree("plan", lines)

    found = verdicts(call, range(3))
    texts = {str(problem) for problem in found.values()}
    assert all(isinstance(problem, DivergenceError) for problem in found.values())
    assert len(texts) == 1
    assert "line 2: rank 0 has" in texts.pop()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a"], r"line 2: rank 0 has 'b', rank 1 has '\(nothing\)'"),
        (["a", "b", "c"], r"line 3: rank 0 has '\(nothing\)', rank 1 has 'c'"),
        (["b", "a"], "line 1: rank 0 has 'a', rank 1 has 'b'"),
    ],
    ids=["fewer", "more", "another order"],
)
def test_the_first_difference_is_the_one_named(lines: list[str], words: str) -> None:
    def call(store: dist.Store, rank: int) -> None:
        mine = lines if rank == 1 else ["a", "b"]
        Control(store, range(2), rank, timeout_s=WAIT_S).agree("plan", mine)

    for problem in verdicts(call, range(2)).values():
        with pytest.raises(DivergenceError, match=words):
            raise problem  # type: ignore[misc]


def test_rounds_of_different_ranks_share_a_store() -> None:
    """Two halves of a job agree on different things at the same time."""

    def call(store: dist.Store, rank: int) -> str:
        half = range(2) if rank < 2 else range(2, 4)
        name = ""
        for step in range(3):
            lines = [f"half {half.start}", f"step {step}"]
            name = Control(store, half, rank, timeout_s=WAIT_S).agree("plan", lines)
        return name

    names = verdicts(call, range(4))
    assert names[0] == names[1] != names[2] == names[3]


def test_the_error_of_a_peer_may_be_of_any_kind() -> None:
    error = TopologyError("sizes", found="2 x 3", why="There are 4 ranks.", fix="Use 2 x 2.")

    def call(store: dist.Store, rank: int) -> None:
        mine = error if rank == 0 else None
        Control(store, range(2), rank, timeout_s=WAIT_S).fail_together("check", mine)

    found = verdicts(call, range(2))
    assert found[0] is error
    assert "rank 0: TopologyError: sizes: 2 x 3" in str(found[1])
