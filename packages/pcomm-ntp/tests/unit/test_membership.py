"""Processes that wait to join, without ranks of their own: stores in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pcomm.core.errors import FencedError, PeerTimeoutError
from pcomm.core.testing.patience import wait_until
from pcomm.ntp.session import Built, Patience
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import Records
from pcomm.ntp.session.resume_point import Arrival
from pcomm.ntp.session.training_state import scalars_of, set_scalars
from pcomm.ntp.session.watch import Watch


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
        Membership(lambda: store, rank, (0,), (0, 1), {}, Patience(join_s=join_s))
        for rank, join_s in ((0, 60.0), (1, 0.0))
    )
    assert member.enter() == {}
    with pytest.raises(PeerTimeoutError) as found:
        late.enter()
    assert member.wants_in()
    late.leave(str(found.value))
    assert not member.wants_in()
    late.close()
    member.close()


def test_of_two_processes_for_one_rank_the_later_one_is_taken_and_the_other_is_a_spare() -> None:
    store = dist.HashStore()
    member, spare, later = (
        Membership(lambda: store, rank, (0,), (0, 1), {}, Patience()) for rank in (0, 1, 1)
    )
    assert member.enter() == {}
    with ThreadPoolExecutor(2) as threads:
        waiting = []
        for number, one in enumerate((spare, later), start=1):
            waiting.append(threads.submit(one.enter))
            wait_until(lambda n=number: store.check([f"pcomm/session/join/{n}"]), "its request")
        assert member.wants_in()
        member.meet("a process joins", Arrival(0))
        assert waiting[1].result() == {0: Arrival(0)}
        assert later.ranks == member.ranks == (0, 1)
        # One process has the rank; the other one waits for it to be free.
        assert not member.wants_in()
        assert not waiting[0].done()
        later.leave("its program ends")
        member.meet("rank 1 has left", Arrival(1))
        waiting[0].result()
        assert spare.ranks == member.ranks == (0, 1)
        assert member.gone == {1: "its program ends"}
    for one in (member, spare, later):
        one.close()


def test_a_rank_that_came_to_the_meeting_and_left_is_gone() -> None:
    store = dist.HashStore()
    member, leaver = (
        Membership(lambda: store, rank, (0, 1), (0, 1), {}, Patience()) for rank in (0, 1)
    )
    member.enter()
    leaver.enter()
    # Interrupted while it waits for the others.
    leaver.records.say(0, 1, Arrival(0))
    leaver.leave("KeyboardInterrupt")
    decision, states = member.meet("rank 1 has left", Arrival(0))
    assert decision.ranks == (0,)
    assert decision.gone == {1: "KeyboardInterrupt"}
    assert states == {0: Arrival(0)}
    member.close()
    leaver.close()


def test_a_process_that_others_have_left_behind_may_write_nothing() -> None:
    store = dist.HashStore()
    member, sleeper = (
        Membership(lambda: store, rank, (0, 1), (0, 1), {}, Patience(leave_s=0.0))
        for rank in (0, 1)
    )
    member.enter()
    sleeper.enter()
    sleeper.check_fence()
    member.meet("rank 1 is silent", Arrival(0))
    member.check_fence()
    with pytest.raises(FencedError, match=r"rank 1 in generation 0: generation 1 has begun"):
        sleeper.check_fence()
    assert member.finish()
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
    built = Built(there, torch.optim.Adam(there.parameters()))
    built.optimizer.param_groups[0][option] = True
    told = scalars_of(Built(own, adam)).replace(f'"{option}": null', f'"{option}": true')
    told = told.replace(f'"{option}": false', f'"{option}": true')
    set_scalars(built, told)
    device = "cpu" if option == "foreach" else "meta"
    counts = [state["step"] for state in built.optimizer.state.values()]
    assert [count.device.type for count in counts] == [device] * 2
