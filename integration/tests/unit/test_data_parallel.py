"""Gradients in buckets: how parameters are dealt out, and sums on both sides of a bucket's size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pcomm.core.collectives import SpyCollectives
from pcomm.core.testing import assert_equal, run_virtual
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.integration.train import data_parallel
from pcomm.integration.train.data_parallel import ReplicaGradients

FULL = (4 << 20) // 4


def test_a_bucket_has_four_mebibytes() -> None:
    assert FULL * 4 == data_parallel._BUCKET_BYTES


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([FULL - 5, 5], [FULL]),
        ([FULL - 5, 6], [6, FULL - 5]),
        ([5, FULL], [FULL, 5]),
        # One parameter is never cut.
        ([FULL + 1], [FULL + 1]),
        ([3, FULL + 1, 3], [3, FULL + 1, 3]),
    ],
    ids=str,
)
def test_gradients_are_summed_on_both_sides_of_the_size_of_a_bucket(
    sizes: list[int], buckets: list[int]
) -> None:
    def on_rank(virtual: VirtualCollectives) -> tuple[list[Tensor], list[int]]:
        spy = SpyCollectives(virtual)
        parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
        gradients = ReplicaGradients([(parameters, spy)])
        gradients.begin_step()
        for factor in (1.0, 2.0):
            gradients.is_last = factor == 2.0
            loss = sum(
                (p * torch.arange(len(p)).remainder(97) * (virtual.rank + 1) * factor).sum()
                for p in parameters
            )
            assert isinstance(loss, Tensor)
            loss.backward()
        gradients.finish_step()
        found = [p.grad.clone() for p in parameters if p.grad is not None]
        return found, [call.input_shape[0] for call in spy.calls]

    for found, reduced in run_virtual(on_rank, 2):
        assert sorted(reduced) == sorted(buckets)
        # (1 + 2) micro-batches times (1 + 2) ranks.
        for gradient, n in zip(found, sizes, strict=True):
            assert_equal(gradient, 9.0 * torch.arange(n).remainder(97))
