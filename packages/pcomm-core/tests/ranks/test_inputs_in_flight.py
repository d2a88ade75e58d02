"""Inputs that their owner drops while an operation is on its way: the numbers still arrive."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks


def numbers(rank: int, rows: int) -> Tensor:
    return ((torch.arange(rows * 2) * 7 + rank * 5) % 23).float().view(2, rows)


# 64 bytes, 400 KB, 4 MB: below and above the 256 KiB from which on gloo goes between pairs.
@pytest.mark.parametrize("rows", [8, 50_000, 500_000])
@ranks(2)
def test_a_dropped_input_is_sent_as_it_was(rank: int, rows: int) -> None:
    """Rank 1 comes to each operation only when rank 0 has dropped its input and filled memory."""
    collectives, store = default_collectives(), dist.distributed_c10d._get_default_store()
    transposed = [numbers(r, rows).t() for r in range(2)]
    halves = torch.stack(transposed).sum(0).chunk(2)
    expected = {
        "all_gather": torch.cat(transposed),
        "reduce_scatter": halves[rank].contiguous(),
        "all_to_all": torch.cat([x.chunk(2)[rank] for x in transposed]),
    }
    for name, result in expected.items():
        ready = f"{name} {rows} is on its way"
        if rank == 1:
            store.wait([ready])
        # Nobody but the operation has the dense copy, nor the tensor itself.
        pending = getattr(collectives, f"{name}_async")(numbers(rank, rows).t())
        gc.collect()
        garbage = [torch.full((rows * 2,), float("nan")) for _ in range(8)]
        if rank == 0:
            store.set(ready, "")
        assert_equal(pending.wait(), result)
        assert all(bool(part.isnan().all()) for part in garbage)
