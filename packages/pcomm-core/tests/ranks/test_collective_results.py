"""What results of distributed collectives are: same dtype, no gradient, and no word from torch."""

from __future__ import annotations

import warnings

import pytest
import torch

from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks

OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@pytest.mark.parametrize("name", OPERATIONS)
@ranks(2)
def test_results_have_the_dtype_and_no_gradient_and_torch_nothing_to_warn_of(
    rank: int, name: str
) -> None:
    run = getattr(default_collectives(), name)
    for dtype in (torch.int32, torch.uint8):
        assert run(torch.ones(4, dtype=dtype)).dtype == dtype
    # The second goes between pairs, where gathers and sums do.
    for length in (4, 300_000):
        x = torch.ones(length, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = run(x)
        out = torch.empty_like(result)
        assert not result.requires_grad
        assert run(x, out=out) is out
        assert not out.requires_grad
        assert_equal(out, result)
