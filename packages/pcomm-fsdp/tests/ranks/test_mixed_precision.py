"""Number formats of computation and reduction give the bits of torch FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.trainings import Block, model_of, open_two, roles_of, tokens
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_mixed_precision_equals_fsdp2(rank: int, reduce_dtype: torch.dtype) -> None:
    theirs = model_of(torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in theirs.blocks:
        fsdp2(block, mesh=mesh, mp_policy=mixed)
    fsdp2(theirs, mesh=mesh, mp_policy=mixed)
    ours = model_of(torch.float32)
    with open_two() as groups:
        sharded = fully_shard(
            ours,
            roles_of(groups),
            units=[Block],
            precision=Precision(torch.bfloat16, reduce_dtype),
        )
        ours_optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for step in range(3):
            mine, other = ours.loss(tokens(step, 0, rank)), theirs.loss(tokens(step, 0, rank))
            assert mine.dtype == torch.bfloat16
            assert_equal(mine.detach(), other.detach())
            mine.backward()
            other.backward()
            for optimizer in (ours_optimizer, their_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        state = sharded.full_state_dict()
        assert all(p.dtype == torch.float32 for p in sharded.parameters())
    for name, value in theirs.named_parameters():
        # Half of a sum is exact, and a sum of two has one order.
        assert_equal(state[name], value.full_tensor())
