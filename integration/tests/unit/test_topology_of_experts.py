"""Which ranks share the experts of a layer, and which hold the same ones."""

from __future__ import annotations

import pytest

from pcomm.integration.config import ParallelConfig
from pcomm.integration.parallelize import topology_of


@pytest.mark.parametrize(
    ("parallel", "ep", "edp"),
    [
        (ParallelConfig(dp=4), (1,), (0, 1, 2, 3)),
        (ParallelConfig(dp=4, ep=2), (0, 1), (1, 3)),
        (ParallelConfig(dp=4, ep=4), (0, 1, 2, 3), (1,)),
        # Neighbours share a tensor-parallel group first, and then its experts.
        (ParallelConfig(dp=2, tp=2, ep=2), (0, 1), (1, 3)),
        (ParallelConfig(dp=2, cp=2, tp=2, ep=4), (0, 1, 2, 3), (1, 5)),
    ],
)
def test_neighbours_share_experts(
    parallel: ParallelConfig, ep: tuple[int, ...], edp: tuple[int, ...]
) -> None:
    topology = topology_of(parallel)
    assert topology.members(1, "expert.ep") == ep
    assert topology.members(1, "expert.edp") == edp
    assert topology.have_same_members("dp_cp_tp", "expert.edp_ep")
