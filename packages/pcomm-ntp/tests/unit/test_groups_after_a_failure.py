"""Groups of the next generation beside those before: what a shrunk communicator would save.

Decision 31 rests on these numbers.
"""

from __future__ import annotations

import pytest

from pcomm.core import Topology
from pcomm.ntp.planning.degrees import Policy
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import all_tensor_groups, grad_groups

Ranks = tuple[int, ...]


def groups_of(dp: int, tp: int, units: int, gone: tuple[int, ...] = ()) -> set[Ranks]:
    """The ranks of each group that a session opens, of two ranks or more."""
    topology = Topology({"dp": dp, "tp": tp})
    failures = Failures.from_global_ranks(gone)
    made = plan(topology, failures, {"w": Units.columns(units)}, Policy(drops_replicas=True))
    found = {tuple(group.ranks) for own in all_tensor_groups(made) for group in own}
    found |= {spec.ranks for spec in grad_groups(made) if spec.ranks is not None}
    everyone = tuple(rank for rank in range(dp * tp) if rank not in gone)
    return {ranks for ranks in {*found, everyone} if len(ranks) > 1}


def compared(dp: int, tp: int, units: int, lost: int) -> tuple[set[Ranks], set[Ranks], set[Ranks]]:
    """Groups after a failure: old ones without that rank, old ones, and those of other ranks."""
    before, after = groups_of(dp, tp, units), groups_of(dp, tp, units, (lost,))
    shrunk = {tuple(rank for rank in ranks if rank != lost) for ranks in before if lost in ranks}
    return after & shrunk, after & before, after - shrunk - before


def test_of_the_case_in_the_decision_two_groups_only_lose_a_rank():
    shrunk, same, new = compared(2, 8, 32, lost=3)
    assert shrunk == {(0, 1, 2, 4, 5, 6, 7), tuple(rank for rank in range(16) if rank != 3)}
    assert (len(same), len(new)) == (8, 6)
    assert len({rank for ranks in new for rank in ranks}) == 11


@pytest.mark.parametrize(("dp", "tp", "units"), [(2, 4, 12), (4, 8, 32), (16, 8, 64)])
@pytest.mark.parametrize("of_last_replica", [False, True])
def test_most_ranks_get_a_group_of_other_ranks(dp, tp, units, of_last_replica):
    lost = dp * tp - 2 if of_last_replica else 1
    shrunk, _, new = compared(dp, tp, units, lost)
    assert len(shrunk) == 2 < len(new)
    in_new = {rank for ranks in new for rank in ranks}
    assert len(in_new) > (dp * tp - 1) / 2
