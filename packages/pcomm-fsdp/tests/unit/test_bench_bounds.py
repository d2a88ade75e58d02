"""`pcomm bench fsdp`: no schedule is faster than the bounds, and some are as fast."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.predictions import StepWork, lower_bounds_s

MEBI = 1 << 20


def best_case_s(step: StepWork, bytes_per_s: float, *, is_one_link: bool) -> float:
    """A run in which everything starts as soon as it can, with memory for all units at once.

    Written apart from the bounds: an account of when each link and the processor are free.
    """
    share = (step.num_ranks - 1) / step.num_ranks / bytes_per_s
    depth = len(step.unit_bytes)
    link = other = clock = 0.0
    for size in step.unit_bytes:
        link += size * share
        clock = max(clock, link) + step.forward_s / depth
    there = [clock] * depth
    if is_one_link:
        # Reduces only once all gathers are done: then the last reduce is all that is exposed.
        other = link
    for unit in reversed(range(step.num_backward_gathers)):
        link += step.unit_bytes[unit] * share
        there[unit] = link
    if is_one_link:
        other = link
    for unit in reversed(range(depth)):
        clock = max(clock, there[unit]) + step.backward_s / depth
        other = max(other, clock) + step.unit_bytes[unit] * share
    return other


steps = st.builds(
    lambda size, depth, ranks, kept, forward, backward: StepWork(
        [size] * depth, ranks, max(0, depth - kept), forward, backward
    ),
    st.integers(1, 4 * MEBI),
    st.integers(1, 12),
    st.integers(2, 9),
    st.integers(0, 3),
    st.floats(0.0, 1.0),
    st.floats(0.0, 2.0),
)


@given(steps, st.floats(1e6, 1e9))
def test_no_run_is_shorter_than_the_bounds(step: StepWork, bytes_per_s: float) -> None:
    one_link, independent = lower_bounds_s(step, bytes_per_s)
    rounding = 1 - 1e-9
    assert best_case_s(step, bytes_per_s, is_one_link=True) >= one_link * rounding
    assert best_case_s(step, bytes_per_s, is_one_link=False) >= independent * rounding
    assert one_link >= independent > 0


@pytest.mark.parametrize(("forward_s", "backward_s"), [(0.0, 0.0), (1.0, 2.0), (0.01, 0.02)])
def test_a_run_on_independent_links_reaches_its_bound(forward_s: float, backward_s: float) -> None:
    # As long as links or the processor are busy all the time, which is which.
    step = StepWork([MEBI] * 8, 2, 7, forward_s, backward_s)
    found = best_case_s(step, 50e6, is_one_link=False)
    assert found == pytest.approx(lower_bounds_s(step, 50e6)[1])


def test_the_case_of_the_reference_notes() -> None:
    # 8 matrices of 768 x 768 in fp32 at 400 Mbit/s, 15 gathers: 543 ms with 2 ranks, 814 with 4.
    for ranks, expected_ms in ((2, 543), (4, 814)):
        step = StepWork([768 * 768 * 4] * 8, ranks, 7, 0.0, 0.0)
        assert lower_bounds_s(step, 50e6)[0] * 1e3 == pytest.approx(expected_ms, abs=1.5)
        assert step.gather_bytes() + step.reduce_bytes() == pytest.approx(
            23 * 768 * 768 * 4 * (ranks - 1) / ranks
        )
