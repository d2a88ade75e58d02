"""Processes that wait to join, without ranks of their own: stores in this process."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pcomm.core.errors import FencedError, PeerTimeoutError
from pcomm.core.testing.programs import wait_until
from pcomm.ntp.session import Timeouts, TrainState
from pcomm.ntp.session.failure_detection import Reach, Watch, left_out, unreachable
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import Records
from pcomm.ntp.session.resume_point import RankState
from pcomm.ntp.session.training_state import scalars_of, set_scalars

# Two replicas, of which the second has two ranks.
PLACES = {0: 0, 1: 1, 2: 1}


def test_a_process_that_waits_does_not_beat_for_the_one_that_has_its_rank() -> None:
    store = dist.HashStore()
    waits = Watch(lambda: store, 1, heartbeat_s=0.01, dead_after_s=60.0)
    enters = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=60.0)
    enters.enter(3, (0, 1), {})
    records = Records(store)
    # As often as it looks, and the one that waits has looked for longer.
    wait_until(lambda: int(records.beat_of(3, 0) or "0") > 3, "beats of rank 0")
    enters.close()
    waits.close()
    assert not [key for key in store.list_keys() if key.endswith("/1")]


def test_a_process_that_has_waited_too_long_is_not_taken_in() -> None:
    store = dist.HashStore()
    member, late = (
        Membership(lambda: store, rank, (0,), PLACES, {}, Timeouts(join_s=join_s))
        for rank, join_s in ((0, 60.0), (1, 0.0))
    )
    assert member.enter() == {}
    with pytest.raises(PeerTimeoutError) as found:
        late.enter()
    assert member.wants_in()
    late.leave(found.value)
    assert not member.wants_in()
    late.close()
    member.close()


def test_of_two_processes_for_one_rank_the_later_one_is_taken_and_the_other_is_a_spare() -> None:
    store = dist.HashStore()
    member, spare, later = (
        Membership(lambda: store, rank, (0,), PLACES, {}, Timeouts()) for rank in (0, 1, 1)
    )
    assert member.enter() == {}
    with ThreadPoolExecutor(2) as threads:
        waiting = []
        for number, one in enumerate((spare, later), start=1):
            waiting.append(threads.submit(one.enter))
            wait_until(lambda n=number: store.check([f"pcomm/session/join/{n}"]), "its request")
        assert member.wants_in()
        member.form_quorum("a process joins", RankState(0))
        assert waiting[1].result() == {0: RankState(0)}
        assert later.ranks == member.ranks == (0, 1)
        # One process has the rank; the other one waits for it to be free.
        assert not member.wants_in()
        assert not waiting[0].done()
        later.leave(SystemExit("its program ends"))
        member.form_quorum("rank 1 has left", RankState(1))
        waiting[0].result()
        assert spare.ranks == member.ranks == (0, 1)
        assert member.gone == {1: "SystemExit: its program ends"}
    for one in (member, spare, later):
        one.close()


def test_a_newcomer_with_which_no_generation_is_complete_is_left_out() -> None:
    store = dist.HashStore()
    member, other, newcomer = (
        Membership(lambda: store, rank, (0, 1), PLACES, {}, Timeouts()) for rank in range(3)
    )
    member.enter()
    other.enter()
    members, error = (member, other), "a connection that broke"
    with ThreadPoolExecutor(3) as threads:
        entered = threads.submit(newcomer.enter)
        wait_until(lambda: store.check(["pcomm/session/join/1"]), "its request")
        for reason, expected in ((None, (0, 1, 2)), (error, (0, 1)), (error, (0, 1))):
            every = members if reason is None else (*members, newcomer)[: len(member.ranks)]
            met = [threads.submit(one.form_quorum, str(reason), RankState(0)) for one in every]
            assert [one.result()[0].ranks for one in met[:2]] == [expected] * 2
            if reason is None:
                entered.result()
            elif len(met) == 3:
                with pytest.raises(FencedError, match="no generation with it was complete"):
                    met[2].result()
    assert member.gone == {2: "no generation with it was complete"}
    for one in (*members, newcomer):
        one.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_process_that_slept_until_its_keys_were_deleted_is_left_behind(is_replaced: bool) -> None:
    store = dist.HashStore()
    ranks = (0, 1, 2) if is_replaced else (0, 1)
    own = {r: Membership(lambda: store, min(r, 1), (0, 1), PLACES, {}, Timeouts()) for r in ranks}
    own[0].enter()
    own[1].enter()
    # It has come to the quorum, and stands still there.
    own[1].records.say(0, 1, RankState(0))
    own[0].form_quorum("a test", RankState(0))
    assert own[0].ranks == (0, 1)
    own[1].records.say_left(1, 1, "no heartbeat")
    with ThreadPoolExecutor(1) as thread:
        if is_replaced:
            entered = thread.submit(own[2]._join, time.monotonic() + 60.0)
            wait_until(lambda: store.check(["pcomm/session/join/1"]), "its request")
        own[0].form_quorum("rank 1 is silent", RankState(0))
        if is_replaced:
            entered.result()
    assert own[0].ranks == ((0, 1) if is_replaced else (0,))
    own[0].note_complete()
    with pytest.raises(FencedError, match="generation 2 has begun"):
        own[1].form_quorum("it goes on", RankState(0))
    for one in own.values():
        one.close()


def test_keys_of_generations_that_are_over_are_deleted() -> None:
    store = dist.HashStore()
    member = Membership(lambda: store, 0, (0,), {0: 0}, {}, Timeouts())
    member.enter()
    counts = []
    for _ in range(4):
        member.form_quorum("a test", RankState(member.number))
        member.control().agree("a topic", ["a line"])
        member.note_complete()
        counts.append(len(store.list_keys()))
    # What a process looks for that slept meanwhile: flag, decision, and the ranks of each.
    assert [after - before for before, after in itertools.pairwise(counts)] == [3] * 3
    member.close()


def test_a_rank_that_has_ended_is_missed_from_the_next_step_on() -> None:
    store = dist.HashStore()
    watch = Watch(lambda: store, 0, heartbeat_s=0.01, dead_after_s=60.0)
    watch.enter(2, (0, 1), {})
    Records(store).say_done(2, 1, 7)
    wait_until(lambda: watch._over is not None, "a look")
    # Its last step had the number 6.
    assert watch.failure() is None
    watch.step = 6
    assert watch.failure() is None
    watch.step = 7
    assert watch.failure() == "rank 1 has ended after 7 steps"
    watch.enter(3, (0, 1), {})
    watch.step = 7
    assert watch.failure() is None
    watch.close()


def test_of_two_ranks_without_a_connection_one_is_left_out() -> None:
    cut = {1: {3: "there: lost"}, 3: {1: "here: lost"}, 0: {2: "elsewhere: lost"}}
    everyone = range(4)
    # Rank 3 is the higher one, and rank 0 the newcomer.
    found = left_out(cut, everyone, {0})
    assert found == {
        0: "rank 0 does not reach rank 2 at elsewhere: lost",
        3: "rank 3 does not reach rank 1 at here: lost",
    }
    # Rank 1 is in two of the three; and what a rank that is gone wrote says nothing.
    assert list(left_out({1: {0: "a", 2: "b"}, 3: {1: "c", 0: "d"}}, range(3), ())) == [1]
    assert left_out({}, everyone, ()) == {}


def test_a_connection_is_made_refused_or_lost() -> None:
    there = Reach()
    refused = Reach()
    refused.close()
    addresses = {0: there.address, 1: refused.address}
    assert unreachable(addresses, 60.0) == {1: f"{refused.address}: Connection refused"}
    # An address for documentation, to which no packet comes, or no route.
    lost = unreachable({**addresses, 2: "192.0.2.1:9"}, 0.2)
    assert sorted(lost) == [1, 2]
    there.drain()
    there.close()


def test_a_rank_that_came_to_the_quorum_and_left_is_gone() -> None:
    store = dist.HashStore()
    member, leaver = (
        Membership(lambda: store, rank, (0, 1), PLACES, {}, Timeouts()) for rank in (0, 1)
    )
    member.enter()
    leaver.enter()
    # Interrupted while it waits for the others.
    leaver.records.say(0, 1, RankState(0))
    leaver.leave(KeyboardInterrupt("by the user"))
    decision, states = member.form_quorum("rank 1 has left", RankState(0))
    assert decision.ranks == (0,)
    assert decision.gone == {1: "KeyboardInterrupt: by the user"}
    assert states == {0: RankState(0)}
    member.close()
    leaver.close()


def test_a_process_that_others_have_left_behind_may_write_nothing() -> None:
    store = dist.HashStore()
    member, sleeper = (
        Membership(lambda: store, rank, (0, 1), PLACES, {}, Timeouts(leave_s=0.0))
        for rank in (0, 1)
    )
    member.enter()
    sleeper.enter()
    sleeper.check_fence()
    member.form_quorum("rank 1 is silent", RankState(0))
    member.check_fence()
    with pytest.raises(FencedError, match=r"rank 1 in generation 0: generation 1 has begun"):
        sleeper.check_fence()
    assert member.finish(0)
    member.check_fence()
    member.close()
    sleeper.close()


@pytest.mark.parametrize("option", ["capturable", "fused", "foreach"])
def test_counts_of_steps_lie_where_the_optimizer_wants_them(option: str) -> None:
    own = nn.Linear(2, 2)
    adam = torch.optim.Adam(own.parameters())
    own(torch.ones(2)).sum().backward()
    adam.step()
    there = nn.Linear(2, 2, device="meta")
    built = TrainState(there, torch.optim.Adam(there.parameters()))
    built.optimizer.param_groups[0][option] = True
    told = scalars_of(TrainState(own, adam)).replace(f'"{option}": null', f'"{option}": true')
    told = told.replace(f'"{option}": false', f'"{option}": true')
    set_scalars(built, told)
    device = "cpu" if option == "foreach" else "meta"
    counts = [state["step"] for state in built.optimizer.state.values()]
    assert [count.device.type for count in counts] == [device] * 2
