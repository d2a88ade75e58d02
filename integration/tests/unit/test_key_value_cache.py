"""Keys and values of a sequence that grows, on both sides of each place where room is made."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from pcomm.core.testing import assert_equal
from pcomm.integration.models.context import KeyValueCache


@pytest.mark.parametrize(
    "lengths",
    [[255, 1, 1], [256, 1], [257, 1], [1] * 300, [100, 157, 128, 1, 400], [700, 2, 347, 1]],
    ids=str,
)
@pytest.mark.parametrize("spare", [0, 5000])
def test_all_tokens_so_far_are_returned(lengths: list[int], spare: int) -> None:
    cache, total = KeyValueCache(sum(lengths) + spare), sum(lengths)
    keys, values = torch.randn(2, total, 2, 3)
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        found = cache.append(keys[start:stop], values[start:stop])
        assert_equal(found[0], keys[:stop])
        assert_equal(found[1], values[:stop])
        assert cache.length == stop
