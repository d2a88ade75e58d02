"""Groups and collectives on NCCL; never run yet, because no machine with two GPUs was at hand."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank: 2"),
]


@ranks(2)
def test_two_roles_gather_and_reduce_on_communicators_of_their_own(rank: int) -> None:
    torch.cuda.set_device(rank)
    options = CommOptions(high_priority=True, max_ctas=4)
    specs = ["dp", GroupSpec("dp", "gather", options), GroupSpec("dp", "control", backend="gloo")]
    with open_groups(Topology({"dp": 2}), specs, backend="nccl") as groups:
        gather, reduce = groups["dp", "gather"], groups["dp"]
        assert gather.process_group is not reduce.process_group
        assert "high_priority" in gather.granted
        mine = torch.arange(6.0, device="cuda") + rank
        whole = torch.cat([torch.arange(6.0) + r for r in range(2)])
        pending = gather.collectives.all_gather_async(mine)
        shard = reduce.collectives.reduce_scatter(mine)
        assert_equal(pending.wait().cpu(), whole)
        assert_equal(shard.cpu(), whole.view(2, 6).sum(0).chunk(2)[rank])
        assert groups["dp", "control"].collectives.all_reduce(torch.ones(1)).item() == 2.0
