"""Processes that wait to join, without ranks of their own: stores in this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pcomm.core.errors import PeerTimeoutError
from pcomm.core.testing.patience import wait_until
from pcomm.ntp.session import Built, Patience
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import Records
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
