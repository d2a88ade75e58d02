"""Gathers and reduces are on their way together, shown without a clock.

Rank 1 joins a reduce only after a gather that was issued later has ended. That works if, and only
if, rank 0's gather does not wait behind its reduce.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.errors import PeerError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles

DEPTH = 6


class Late(InstrumentedCollectives):
    """Collectives that join each reduce when it is waited for, and after the last gather.

    Args:
        inner: What communicates.
        gathers: All gathers so far, shared by both roles.
        is_late: Whether to do so; if not, reduces start when they are issued.
    """

    def __init__(self, inner: Collectives, gathers: list[Pending], is_late: bool) -> None:
        super().__init__(inner)
        self._gathers, self._is_late = gathers, is_late

    def start(self, call: Call) -> Pending:
        """Keep a gather, and join a late reduce when it is waited for."""
        if self._is_late and call.operation == "reduce_scatter":
            return Pending(lambda: self._join(call))
        pending = super().start(call)
        if call.operation == "all_gather":
            self._gathers.append(pending)
        return pending

    def _join(self, call: Call) -> Tensor:
        self._gathers[-1].wait()
        return self.inner.run(call)


def late(group: Group, gathers: list[Pending], is_late: bool) -> Group:
    return group.with_collectives(Late(group.collectives, gathers, is_late))


def _flat(part: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, without the guard against taking it for the whole."""
    assert part.grad is not None
    return part.grad.as_subclass(Tensor).flatten()


def train_with_late_reduces(
    rank: int, width: int, *, is_separate: bool, timeout_s: float
) -> list[Tensor]:
    """Two steps, the second of them with late reduces on rank 1; the gradients of both."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))
    # One worker thread makes a queue of a communicator, as NCCL's are.
    options = CommOptions(threads=1, timeout_s=timeout_s)
    specs = [GroupSpec("dp", role, options) for role in ("gather", "reduce")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        gathers: list[Pending] = []
        gather = late(groups["dp", "gather"], gathers, False)
        own = groups["dp", "reduce" if is_separate else "gather"]
        wrapper = Late(own.collectives, gathers, False)
        roles = Roles(gather, own.with_collectives(wrapper))
        sharded = fully_shard(model, roles, units=[nn.Linear])
        found = []
        for step in range(2):
            wrapper._is_late = step == 1 and rank == 1
            sharded.zero_grad()
            model(torch.ones(4, width)).square().mean().backward()
            found.append(torch.cat([_flat(p) for p in sharded.parameters()]))
        return found


@pytest.mark.parametrize("width", [16, 512], ids=["by torch", "between pairs"])
@ranks(2)
def test_a_gather_goes_on_while_a_reduce_is_stuck(rank: int, width: int) -> None:
    first, second = train_with_late_reduces(rank, width, is_separate=True, timeout_s=PATIENCE_S)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("width", [16, 512], ids=["by torch", "between pairs"])
@ranks(2)
def test_on_one_communicator_it_does_not(rank: int, width: int) -> None:
    """The test above can fail: here the gather is behind the reduce, and time runs out."""
    with pytest.raises(PeerError):
        train_with_late_reduces(rank, width, is_separate=False, timeout_s=3)
