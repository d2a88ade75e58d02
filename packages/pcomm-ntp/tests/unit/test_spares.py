"""Spare processes that ask for places, without ranks of their own: stores in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pcomm.core import Topology
from pcomm.core.errors import ClosedError, ConfigError, PeerError
from pcomm.core.testing.programs import wait_until
from pcomm.ntp.session import Session, Timeouts
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import Decision, Join
from pcomm.ntp.session.resume_point import RankState
from pcomm.ntp.session.spares import Spares

PLACES = {0: 0, 1: 0, 2: 1, 3: 1}


def member_of(store: dist.Store, rank: int, ranks: tuple[int, ...] = (0, 1), **options):
    is_spare = rank not in PLACES
    limits = Timeouts(heartbeat_s=0.01, join_s=60.0)
    places = {one: PLACES[one] for one in ranks}
    return Membership(lambda: store, rank, ranks, places, {}, limits, is_spare=is_spare, **options)


def tell_end(
    store: dist.Store, process: int, reason: str = "killed by SIGKILL", incarnation: int = 0
) -> None:
    """What a launcher writes when a process has ended."""
    number = store.add("pcomm/ended/count", 1)
    store.set(f"pcomm/ended/{number}", f"{process} {incarnation} {reason}")


def wait_for_request(store: dist.Store, number: int) -> None:
    wait_until(lambda: store.check([f"pcomm/session/join/{number}"]), f"request {number}")


@pytest.mark.parametrize(
    ("left", "spares", "expected"),
    [
        ((0, 1, 2, 3), 2, {}),
        ((0, 2, 3), 2, {1: 4}),
        # A replica that lacks one rank comes before one that lacks two.
        ((0,), 1, {1: 4}),
        ((2,), 2, {3: 4, 0: 5}),
        ((), 3, {0: 4, 1: 5, 2: 6}),
    ],
)
def test_places_are_filled_so_that_replicas_are_whole(left, spares, expected):
    waiting = Spares(PLACES)
    for number in range(spares):
        waiting.wait(number, Join(4 + number, str(number), 0, {}, is_spare=True))
    assert waiting.could_fill(left) == bool(expected)
    found = waiting.fill(left, lambda join: False)
    assert {place: join.rank for place, join in found.items()} == expected
    answered = waiting.fill(left, lambda join: join.rank == 4)
    assert 4 not in {join.rank for join in answered.values()}


@pytest.mark.parametrize(
    ("event", "expected"),
    [("", [4, 5]), ("the first spare dies", [5, 1]), ("the rank comes back", [1, 4])],
)
def test_a_place_is_given_to_one_process_and_again_when_that_has_ended(event, expected):
    store = dist.HashStore()
    stays, dies, own = (member_of(store, rank) for rank in (0, 1, 1))
    waiting = {4: member_of(store, 4), 5: member_of(store, 5), 1: own}
    stays.enter()
    dies.enter()
    with ThreadPoolExecutor(3) as threads:
        entered = {}
        for number in (4, 5):
            entered[number] = threads.submit(waiting[number].enter)
            wait_for_request(store, number - 3)
        # They wait for a place, and no step is delayed by it.
        assert not stays.wants_in()
        tell_end(store, 4 if event == "the first spare dies" else 1)
        if event == "the rank comes back":
            entered[1] = threads.submit(own.enter)
            wait_for_request(store, 3)
        dies.leave(SystemExit("its program ends"))
        for number in expected:
            if number not in entered:
                tell_end(store, 1)
                entered[1] = threads.submit(own.enter)
                wait_for_request(store, 3)
            decision, _ = stays.form_quorum("a test", RankState(stays.number))
            # One change of ranks misses the process that has ended and has the next one.
            assert 1 in decision.gone
            assert (decision.ranks, decision.processes.get(1, 1)) == ((0, 1), number)
            entered.pop(number).result()
            assert waiting[number].rank == 1
            # The launcher tells its end by the number with which it was started.
            incarnation = decision.incarnations.get(1, 0)
            tell_end(store, number, incarnation=incarnation)
            wait_until(lambda: stays.watch.failure() is not None, "the end of its process")
            assert stays.watch.failure() == "rank 1 has ended: killed by SIGKILL"
        stays.records.decide(stays.number, Decision(()))
        for one in entered.values():
            with pytest.raises(ClosedError):
                one.result()
    for member in (stays, dies, *waiting.values()):
        member.close()


@pytest.mark.parametrize(
    ("reason", "options", "begins"),
    [
        ("killed by SIGKILL", {"are_enough": lambda ranks: len(ranks) == 2}, True),
        ("killed by SIGKILL", {"are_enough": lambda ranks: len(ranks) == 3}, False),
        ("killed by SIGKILL", {}, False),
        ("failed: ValueError: no such file", {"are_enough": lambda ranks: True}, False),
    ],
)
def test_spares_begin_again_when_no_rank_is_left(reason, options, begins):
    store = dist.HashStore()
    first = [member_of(store, rank) for rank in (0, 1)]
    spares = [member_of(store, number, **options) for number in (4, 5)]
    for one in first:
        one.enter()
    with ThreadPoolExecutor(2) as threads:
        entered = []
        for number, spare in enumerate(spares, start=1):
            entered.append(threads.submit(spare.enter))
            wait_for_request(store, number)
        tell_end(store, 0, "killed by SIGKILL")
        tell_end(store, 1, reason)
        for spare, one in zip(spares, entered, strict=True):
            if begins:
                assert one.result() == {}
                assert spare.ranks == (0, 1)
            else:
                with pytest.raises(PeerError, match="No rank is left"):
                    one.result()
        if begins:
            assert [spare.rank for spare in spares] == [0, 1]
    for one in (*first, *spares):
        one.close()


def test_a_process_that_comes_back_to_no_rank_and_no_checkpoint_does_not_wait_for_others():
    """Only a checkpoint could begin the job again, however many ranks come back."""
    store = dist.HashStore()
    first = [member_of(store, rank) for rank in (0, 1)]
    for rank, one in enumerate(first):
        one.enter()
        tell_end(store, rank)
    back = member_of(store, 0)
    with pytest.raises(PeerError, match="No rank is left"):
        back.enter()
    for one in (*first, back):
        one.close()


def test_a_spare_has_no_rank_of_the_topology():
    with pytest.raises(ConfigError, match="Number spares from 2 on"):
        Session(dist.HashStore, Topology({"dp": 2, "tp": 1}), {}, None, rank=1, is_spare=True)
