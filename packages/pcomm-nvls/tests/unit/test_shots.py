"""In how many steps an all-reduce goes."""

from __future__ import annotations

import pytest

from pcomm.nvls.policy.choose import is_one_shot


def largest(world_size: int, way: str, architecture: str) -> int | None:
    """The largest size that takes one step, found by halving; None where each does."""
    low, high = 0, 1 << 40
    if is_one_shot(high, world_size, way, architecture):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if is_one_shot(middle, world_size, way, architecture):
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize(
    ("world_size", "way", "sizes"),
    [
        # Bytes that a rank has to send, of S: one step N S or (N-1) S, two steps S + S/N or
        # 2 (N-1)/N S. The difference is what a link moves during a barrier.
        (2, "multicast", (740_000 * 2, 1_440_000 * 2)),
        (4, "multicast", (740_000 * 4 // 11, 1_440_000 * 4 // 11)),
        (8, "multicast", (740_000 * 8 // 55, 1_440_000 * 8 // 55)),
        # Two ranks exchange their tensors in both.
        (2, "peers", (None, None)),
        (4, "peers", (740_000 * 4 // 6, 1_440_000 * 4 // 6)),
        (8, "peers", (740_000 * 8 // 42, 1_440_000 * 8 // 42)),
    ],
)
def test_one_step_is_taken_while_its_bytes_cost_less_than_a_barrier(world_size, way, sizes):
    found = tuple(largest(world_size, way, name) for name in ("sm_90", "sm_100"))
    assert found == sizes
    assert largest(world_size, way, "sm_120") == sizes[1]
