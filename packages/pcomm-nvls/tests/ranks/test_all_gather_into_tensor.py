"""All-gather under emulation, against torch.distributed: every dtype, dimension and algorithm."""

from __future__ import annotations

import random
import time

import pytest
import torch
from pcomm.core.errors import ConfigError, LayoutError, PeerTimeoutError, UnsupportedError
from pcomm.core.process.world import world_group
from pcomm.core.testing import ranks
from torch import Tensor

from pcomm.nvls.testing.emulation import emulate

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool]


def shard(generator: random.Random, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes that differ between ranks and calls; any bit pattern but for booleans."""
    torch.manual_seed(generator.randrange(1 << 30) * 8 + rank)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def run_cases(rank: int, size: int, num_cases: int) -> None:
    emulate()
    from pcomm.nvls.collectives.all_gather_into_tensor import all_gather_into_tensor
    from pcomm.nvls.workspace.workspace import Workspace

    group, generator = default_group_as("tp"), random.Random(size)
    with Workspace(group, 1 << 16) as workspace:
        for case in range(num_cases):
            dtype, dim = generator.choice(DTYPES), generator.choice([0, -1, 1])
            rows, columns = generator.randrange(1, 9), 16 * generator.randrange(1, 9)
            algo = generator.choice(["multimem", "p2p", "dist"])
            shape = (rows, columns) if dim != 1 else (rows, 2, columns)
            x = shard(generator, rank, dtype, shape)
            if generator.random() < 0.3:
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            if generator.randrange(size * 3) == rank:
                time.sleep(0.01)
            inner = group.collectives.all_gather(x, dim=dim)
            out = torch.empty_like(inner) if generator.random() < 0.5 else None
            found = all_gather_into_tensor(
                out, x, workspace=workspace, dim=dim, algo=algo if dim != 1 else "auto"
            )
            assert same_bits(found, inner), (case, dtype, dim, algo, shape)
            assert out is None or found is out
