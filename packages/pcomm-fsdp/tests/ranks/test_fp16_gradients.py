"""Gradients in fp16, whose sum over ranks may be too large where their mean is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, ReshardPolicy, Roles

FP16 = torch.float16
LARGE = 40_000.0


class Product(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 130))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def values(rows: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, 130, generator=generator)
    x[0] = LARGE
    x[1] = LARGE if rank else -LARGE
    x[2] = 2.0**-20
    return x.to(FP16)


def fsdp2_gradient(rows: int, rank: int) -> Tensor:
    model = Product(rows)
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)
    fsdp2(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model(values(rows, rank)).backward()
    gradient: Tensor = model.weight.grad.full_tensor()  # type: ignore[union-attr]
    return gradient


@pytest.mark.parametrize("reduce", ["micro_batch", "step"])
@ranks(2)
def test_as_fsdp2_divides(rank: int, reduce: str) -> None:
    """Small, and beyond a mebibyte; the mean, and a sum that fp32 has room for."""
    for rows in (3, 5000):
        expected = fsdp2_gradient(rows, rank)
        assert expected[0, 0] == LARGE
        with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
            roles = Roles(groups["dp"], groups["dp", "reduce"])
            for divisor in (None, 1.0, 6.0):
                model = Product(rows)
                sharded = fully_shard(
                    model,
                    roles,
                    units=[],
                    reshard=ReshardPolicy(reduce=reduce),  # type: ignore[arg-type]
                    precision=Precision(FP16, FP16, torch.float32),
                    divisor=divisor,
                )
                model(values(rows, rank)).backward()
                found = sharded.full_gradients()["weight"]
                if divisor is None:
                    assert torch.equal(found, expected)
                else:
                    torch.testing.assert_close(found, expected * 2 / divisor, rtol=1e-6, atol=0)
