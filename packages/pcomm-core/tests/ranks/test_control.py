"""A control on a plain store: no process group, ranks as threads around one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch.distributed as dist

from core_support.callers import together
from core_support.generations import following, joined
from pcomm.core.control.agreement_round import AgreementRound
from pcomm.core.control.control import Control, format_ranks, parse_ranks, ranks_key
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    FencedError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)

# Far beyond what a round takes, and for calls to which no other rank comes.
WAIT_S, SHORT_S = 60.0, 0.2


def hash_store(_: Path) -> dist.Store:
    return dist.HashStore()


def file_store(folder: Path) -> dist.Store:
    return dist.FileStore(str(folder / "store"), 4)


def tcp_store(_: Path) -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    """That of a job, but where a test asks for any kind of store."""
    made: dist.Store = getattr(request, "param", tcp_store)(tmp_path)
    assert not dist.is_initialized()
    return made


on_any_store = pytest.mark.parametrize(
    "store", [hash_store, file_store, tcp_store], ids=["hash", "file", "tcp"], indirect=True
)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread; by looks, as a blocking wait keeps its store from the others."""
    while not is_so():
        threading.Event().wait(0.001)


def meet(controls: dict[int, Control]) -> str:
    """The name that all ranks get in one round."""
    names = together(lambda rank: controls[rank].agree("plan", ["same"]), controls)
    (name,) = {str(found) for found in names.values()}
    assert name.startswith("pcomm/"), name
    return name


def controls_of(
    store: dist.Store, ranks: Iterable[int], generation: int = 0, timeout_s: float = WAIT_S
) -> dict[int, Control]:
    members = tuple(ranks)
    return {
        rank: Control(store, members, rank, generation=generation, timeout_s=timeout_s)
        for rank in members
    }


def mistake() -> ConfigError:
    return ConfigError("steps", found="0", why="None.", fix="Use 1.")


# -- a round ---------------------------------------------------------------------------------


@on_any_store
def test_ranks_agree_on_any_store(store: dist.Store) -> None:
    three = controls_of(store, range(3))
    names = [meet(three) for _ in range(4)]
    assert len(set(names)) == 4
    errors = together(
        lambda rank: three[rank].fail_together("check", mistake() if rank == 1 else None), range(3)
    )
    assert [type(errors[rank]) for rank in range(3)] == [PeerError, ConfigError, PeerError]
    for rank in (0, 2):
        text = str(errors[rank])
        assert text.startswith("check: an error on rank 1: ConfigError: steps: 0")
        assert "Use 1." in text
        assert f"Rank {rank} is fine" in text
    # Several errors leave each rank with its own.
    own = {rank: mistake() for rank in range(2)}
    errors = together(lambda rank: three[rank].fail_together("check", own.get(rank)), range(3))
    assert [errors[rank] is own[rank] for rank in range(2)] == [True, True]
    assert isinstance(errors[2], PeerError)
    differences = together(lambda rank: three[rank].agree("plan", [f"rank {rank // 2}"]), range(3))
    for problem in differences.values():
        assert isinstance(problem, DivergenceError)
        assert "line 1: rank 0 has 'rank 0', rank 2 has 'rank 1'" in str(problem)
    meet(three)


def test_an_error_is_told_before_a_difference(store: dist.Store) -> None:
    """Also where the rank whose lines the others compare with has no lines because of it."""
    three = controls_of(store, range(3))
    for odd in range(3):
        found = together(
            lambda rank, odd=odd: three[rank].agree(  # type: ignore[misc]
                "plan", [] if rank == odd else ["a"], error=mistake() if rank == odd else None
            ),
            range(3),
        )
        assert isinstance(found.pop(odd), ConfigError)
        assert all(isinstance(problem, PeerError) for problem in found.values())
        assert all(f"rank {odd}: ConfigError: steps: 0" in str(p) for p in found.values())


def test_a_missing_rank_is_named_on_every_rank_and_missed_by_none_the_next_time(
    store: dist.Store,
) -> None:
    three = controls_of(store, range(3))
    for absent in (1, 0, 2):
        first, second = (rank for rank in range(3) if rank != absent)
        for _ in range(2):
            found = together_in_order(three, (first, second), store, timeout_s=SHORT_S)
            assert {type(problem) for problem in found.values()} == {PeerTimeoutError}
            assert len({str(problem) for problem in found.values()}) == 1
            assert f"ranks [{absent}] of 3 did not arrive within 0.2 s" in str(found[first])
            assert "PCOMM_TIMEOUT_S" in str(found[first])
        meet(controls_of(store, range(3)))


def test_one_rank_gives_up_for_all_that_wait(store: dist.Store) -> None:
    """Rank 1 would wait for the lines of rank 0, and rank 2 for the end, for an hour."""
    limits = {1: 3600.0, 2: 3600.0, 3: SHORT_S}
    four = controls_of(store, range(4))

    def call(rank: int) -> object:
        if rank == 3:
            # Its short time begins when the others are there.
            until(lambda: store.check([f"{four[0].prefix}/plan/at/{r}" for r in (1, 2)]))
        lines = ["same"] if rank != 2 else None
        return four[rank].agree("plan", lines, timeout_s=limits[rank])

    found = together(call, limits)
    assert {type(problem) for problem in found.values()} == {PeerTimeoutError}
    assert len({str(problem) for problem in found.values()}) == 1
    assert "ranks [0] of 4 did not arrive within 0.2 s" in str(found[1])


def test_a_late_rank_does_not_go_on_alone() -> None:
    """Once a rank has given up, the one that comes later meets it in its next call or in none."""
    store = dist.HashStore()
    with pytest.raises(PeerTimeoutError):
        Control(store, range(2), 0, timeout_s=0.3).fail_together("check", None)
    words = (
        r"ranks \[0\] of 2 did not arrive within 0\.2 s; of the call before, "
        r"ranks \[1\] of 2 did not arrive within 0\.3 s"
    )
    late = Control(store, range(2), 1, timeout_s=SHORT_S)
    with pytest.raises(PeerTimeoutError, match=words):
        late.fail_together("check", None)
    # Who has an error keeps it, also where the other one never comes.
    with pytest.raises(ConfigError, match="steps: 0"):
        late.fail_together("check", mistake())


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
    pair = controls_of(dist.HashStore(), range(2))
    found = together(lambda rank: pair[rank].agree("plan", lines if rank else ["a", "b"]), range(2))
    for problem in found.values():
        with pytest.raises(DivergenceError, match=words):
            raise problem  # type: ignore[misc]


def test_a_rank_that_comes_while_the_others_call_again_meets_them(store: dist.Store) -> None:
    """It was missing in one call; what it then calls is the others' next one."""
    with pytest.raises(PeerTimeoutError):
        Control(store, (0, 1), 0, timeout_s=SHORT_S).agree("plan", ["a"])
    for order in ((0, 1), (1, 0)):
        # Whoever is first waits for the other one.
        pair = controls_of(store, (0, 1))
        threads = together_in_order(pair, order, store)
        assert len(set(threads.values())) == 1


def together_in_order(
    controls: dict[int, Control],
    order: tuple[int, int],
    store: dist.Store,
    timeout_s: float = WAIT_S,
) -> dict[int, object]:
    """The second rank calls, and its time begins, once the first one has arrived."""
    first, second = order
    prefix = f"{controls[first].prefix}/plan"
    before = number_in(store, f"{prefix}/now")

    def call(rank: int) -> object:
        if rank == second:
            until(lambda: number_in(store, f"{prefix}/at/{first}") > before)
            return controls[rank].agree("plan", ["a"], timeout_s=timeout_s)
        return controls[rank].agree("plan", ["a"])

    return together(call, order)


def number_in(store: dist.Store, key: str) -> int:
    """The number of a round at the beginning of a value; 0 where there is none."""
    return int(store.get(key).split()[0]) if store.check([key]) else 0


def test_a_rank_that_is_given_up_on_as_it_comes_takes_part_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 looks at the number, rank 0 gives up, rank 1 arrives: too late for that number."""
    store = dist.HashStore()
    arrive = AgreementRound._arrive
    given_up: list[object] = []

    def late(self: AgreementRound) -> None:
        if self._rank == 1 and not given_up:
            found = together(lambda _: zero.agree("plan", ["a"], timeout_s=SHORT_S), [0])
            given_up.append(found[0])
        arrive(self)

    monkeypatch.setattr(AgreementRound, "_arrive", late)
    zero, one = controls_of(store, (0, 1)).values()

    def call(rank: int) -> str:
        if rank == 1:
            return one.agree("plan", ["a"])
        until(lambda: bool(given_up))
        return zero.agree("plan", ["a"])

    found = together(call, (0, 1))
    assert isinstance(given_up[0], PeerTimeoutError)
    assert found[0] == found[1]


def test_an_interrupted_rank_that_calls_again_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    pair = controls_of(store, (0, 1), timeout_s=SHORT_S)
    hear = AgreementRound.hear

    def interrupted(self: AgreementRound, name: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(AgreementRound, "hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair[1].fail_together("check", None)
    monkeypatch.setattr(AgreementRound, "hear", hear)
    with pytest.raises(PeerTimeoutError, match=r"ranks \[0\] of 2"):
        pair[1].fail_together("check", None)


def test_one_rank_needs_no_store() -> None:
    alone = Control(None, (5,), 5)
    alone.agree("plan", ["anything"])
    with pytest.raises(ConfigError, match="steps: 0"):
        alone.fail_together("check", mistake())


def test_one_rank_of_several_agrees_with_itself() -> None:
    store = dist.HashStore()
    alone = Control(store, range(2), 1).among([1])
    assert alone.agree("plan", ["a"]) != alone.agree("plan", ["a"])
    with pytest.raises(ConfigError, match="steps: 0"):
        alone.fail_together("check", mistake())
    following(Control(store, range(2), 0), [0])
    with pytest.raises(FencedError):
        alone.agree("plan", ["a"])


# -- sets of ranks -----------------------------------------------------------------------------


def test_sets_with_the_same_first_rank_meet_at_the_same_time(store: dist.Store) -> None:
    """Rank 0 is in a round of two and in one of three at once, by two threads."""
    pair, three = controls_of(store, (0, 1)), controls_of(store, (0, 1, 2))

    def call(caller: int) -> str:
        control = pair[caller] if caller < 2 else three[caller - 2]
        return "".join(control.agree("plan", [str(control.ranks)]) for _ in range(5))

    found = together(call, range(5))
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4]
    assert found[0] != found[2]


def test_callers_outside_the_set_are_refused_at_once() -> None:
    store = dist.HashStore()
    with pytest.raises(TopologyError, match=r"ranks 0-2: this is rank 3"):
        Control(store, range(3), 3)
    with pytest.raises(TopologyError, match="no store"):
        Control(None, range(2), 0)
    control = Control(store, range(4), 3)
    with pytest.raises(TopologyError, match=r"ranks 0-1: this is rank 3"):
        control.among([0, 1])
    with pytest.raises(TopologyError, match=r"of ranks 0-3, without 5,7"):
        control.among([3, 5, 7])
    assert control.among([2, 3]).among([3]).ranks == (3,)
    assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), (range(8), "0-7"), ([0, 1, 2, 6, 8, 9], "0-2,6,8-9"), ([3, 5, 7], "3,5,7")],
)
def test_ranks_are_spelled_as_runs(ranks: Iterable[int], text: str) -> None:
    members = tuple(ranks)
    assert format_ranks(members) == ranks_key(members) == text
    assert parse_ranks(text) == members


def test_a_set_has_a_word_of_its_own_of_forty_characters_at_most() -> None:
    for ranks, length in (([2, *range(10, 36, 2)], 40), ([*range(10, 38, 2)], 41)):
        text = format_ranks(ranks)
        assert len(text) == length
        assert parse_ranks(text) == tuple(ranks)
        assert (ranks_key(ranks) == text) == (length <= 40)
    even, other = range(0, 4096, 2), [*range(0, 4094, 2), 4095]
    assert len(ranks_key(even)) <= 40
    assert ranks_key(even) != ranks_key(other)


# -- generations -------------------------------------------------------------------------------


@on_any_store
def test_survivors_begin_a_generation_and_a_zombie_is_fenced(store: dist.Store) -> None:
    first = controls_of(store, range(3))
    meet(first)
    second = {rank: following(first[rank], [0, 1]) for rank in (0, 1)}
    told = {(c.generation, c.ranks, c.timeout_s) for c in second.values()}
    assert told == {(1, (0, 1), WAIT_S)}
    meet(second)
    before = store.num_keys()
    for call in (
        lambda: first[2].agree("plan", ["same"]),
        lambda: first[2].fail_together("check", None),
        lambda: first[2].among([1, 2]).agree("plan", ["same"]),
        lambda: Control(store, range(3), 2, generation=1),
    ):
        with pytest.raises(FencedError, match=r"generation 1 has begun, of ranks 0-1, without"):
            call()
    # A survivor that forgot to take the new one is told so, and nothing it wrote is read.
    with pytest.raises(FencedError, match=r"has begun, of ranks 0-1\n(.*\n)*.*newest generation"):
        first[0].agree("plan", ["same"])
    assert store.num_keys() == before
    meet(second)


def test_a_zombie_that_has_an_error_keeps_it() -> None:
    store = dist.HashStore()
    pair = controls_of(store, range(2))
    following(pair[0], [0])
    with pytest.raises(ConfigError, match="steps: 0"):
        pair[1].fail_together("check", mistake())


def test_a_rank_that_waits_leaves_when_a_generation_begins(store: dist.Store) -> None:
    """Long before its own time limit: a test that waits for that fails as a whole."""
    first = controls_of(store, range(3), timeout_s=3600.0)

    def call(rank: int) -> object:
        if rank == 2:
            until(lambda: store.check([f"{first[0].prefix}/plan/at/{r}" for r in (0, 1)]))
            return following(first[2], [1, 2])
        return first[rank].agree("plan", ["same"])

    found = together(call, range(3))
    assert isinstance(found[0], FencedError)
    assert "without rank 0" in str(found[0])
    assert isinstance(found[1], FencedError)
    assert "newest generation" in found[1].fix


def test_a_rank_comes_back_in_a_later_generation(store: dist.Store) -> None:
    first = controls_of(store, range(3))
    for _ in range(3):
        meet(first)
    second = {rank: following(first[rank], [0, 1]) for rank in (0, 1)}
    meet(second)
    found = together(
        lambda rank: (
            joined(store, 2, timeout_s=WAIT_S) if rank == 2 else following(second[rank], range(3))
        ),
        range(3),
    )
    third = {rank: c for rank, c in found.items() if isinstance(c, Control)}
    assert {(c.generation, c.ranks) for c in third.values()} == {(2, (0, 1, 2))}
    assert "/2/" in meet(third)
    # What it was before is of no use to it, nor to its former self.
    with pytest.raises(FencedError):
        first[2].agree("plan", ["same"])
    with pytest.raises(FencedError, match="generation 2 has begun"):
        second[0].agree("plan", ["same"])


@on_any_store
def test_generations_may_be_counted_elsewhere(store: dist.Store) -> None:
    """Such as the number of restarts of a launcher, which may leave some out."""
    first = controls_of(store, range(3))
    meet(first)
    later = controls_of(store, (0, 2), generation=4)
    meet(later)
    for generation in (1, 3, 4):
        with pytest.raises(FencedError):
            Control(store, range(3), 1, generation=generation)
    with pytest.raises(FencedError):
        first[1].agree("plan", ["same"])
    with pytest.raises(DivergenceError, match="generation 4 is of ranks 0,2"):
        Control(store, (0, 1), 0, generation=4)
    with pytest.raises(FencedError, match="generation 4 has begun"):
        Control(store, (0, 2), 0, generation=3)


# -- what is left in the store -----------------------------------------------------------------


@on_any_store
def test_a_long_run_does_not_fill_the_store(store: dist.Store) -> None:
    three = controls_of(store, range(3))
    short = controls_of(store, range(3), timeout_s=0.05)

    def round_of_everything() -> int:
        meet(three)
        together(lambda rank: three[rank].agree("plan", [str(rank)]), range(3))
        error = mistake()
        together(lambda rank: three[rank].fail_together("plan", error), range(3))
        for _ in range(2):
            with pytest.raises(PeerTimeoutError):
                short[1].agree("plan", ["same"])
        meet(three)
        return store.num_keys()

    first = round_of_everything()
    assert [round_of_everything() for _ in range(3)] == [first] * 3


def test_keys_of_a_round_stay_until_all_have_read_them() -> None:
    """The slowest rank reads how a round ended while the others are in the next one."""
    store = dist.HashStore()
    pair = controls_of(store, (0, 1))
    name = meet(pair)
    with pytest.raises(PeerTimeoutError):
        pair[0].agree("plan", ["same"], timeout_s=SHORT_S)
    assert store.check([f"{name}/outcome"])
    meet(pair)
    assert not store.check([f"{name}/outcome"])
