"""What a rank hears of one that has failed."""

from __future__ import annotations

import torch.distributed as dist

from pcomm.core.control.agreement import FailureFlag
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology


@ranks(4)
def test_only_the_group_and_the_round_hear_it(rank: int) -> None:
    with open_groups(Topology({"dp": 2, "tp": 2}), ["dp", "tp"]) as groups:
        flag, other = FailureFlag(groups["tp"], "work"), FailureFlag(groups["tp"], "work")
        dist.barrier()
        if rank == 1:
            flag.sound("out of paper", round_number=3)
            flag.sound("and of ink", round_number=3)
        dist.barrier()
        assert flag.heard(round_number=3) == ("rank 1: out of paper" if rank < 2 else None)
        assert flag.heard(round_number=4) is None
        assert other.heard(round_number=3) is None


def test_alone_nobody_listens() -> None:
    flag = FailureFlag(Group("dp", (0,), None), "work")
    flag.sound("out of paper", round_number=0)
    assert flag.heard(round_number=0) is None
