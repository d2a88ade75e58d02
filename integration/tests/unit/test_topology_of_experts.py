"""Which ranks share the experts of a layer, and which hold the same ones."""

from __future__ import annotations

import pytest

from integration_support.short_runs import tiny_config
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import ParallelConfig
from pcomm.integration.parallelize import topology_of


@pytest.mark.parametrize(
    ("parallel", "ep", "holders"),
    [
        (ParallelConfig(dp=4), (1,), (0, 1, 2, 3)),
        (ParallelConfig(dp=4, ep=2), (0, 1), (1, 3)),
        (ParallelConfig(dp=4, ep=4), (0, 1, 2, 3), (1,)),
        (ParallelConfig(dp=4, ep=2, data="shard"), (0, 1), (1, 3)),
        (ParallelConfig(dp=4, ep=2, data="hybrid", shard_ranks=2), (0, 1), (1, 3)),
        # Neighbours share a tensor-parallel group first, and then its experts.
        (ParallelConfig(dp=2, tp=2, ep=2), (0, 1), (1, 3)),
        (ParallelConfig(dp=2, cp=2, tp=2, ep=4), (0, 1, 2, 3), (1, 5)),
    ],
)
def test_neighbours_share_experts(parallel, ep, holders):
    config = tiny_config(parallel, model={"experts": 8})
    topology = topology_of(validate(config, parallel.dp * parallel.cp * parallel.tp).parallel)
    assert topology.members(1, "expert.ep") == ep
    # Those that hold the same experts keep them whole, or share them.
    mine, other = ("outer", "inner") if parallel.data == "replicate" else ("inner", "outer")
    assert topology.members(1, f"expert.{mine}") == holders
    assert topology.members(1, f"expert.{other}") == (1,)
    assert topology.have_same_members("dp_cp_tp", "expert.outer_inner_ep")
