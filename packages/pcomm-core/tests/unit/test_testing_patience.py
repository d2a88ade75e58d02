"""Time limits of tests: as they are on a quiet machine, longer on a busy one, and never endless."""

from __future__ import annotations

import os

import pytest

from pcomm.core.testing import programs as patience
from pcomm.core.testing.programs import LONGEST_S, rank_limit_s, scaled_s, wait_until


@pytest.mark.parametrize(
    ("waiting", "factor"), [(0.0, 1.0), (2.0, 1.0), (2.1, 1.05), (6.0, 3.0)], ids=str
)
def test_a_limit_grows_once_more_threads_wait_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, waiting: float, factor: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (waiting, 99.0, 99.0))
    assert scaled_s(10.0) == pytest.approx(10.0 * factor)
    monkeypatch.setenv("PCOMM_RANKS_TIMEOUT_S", "20")
    assert rank_limit_s() == pytest.approx(20.0 * factor)


def test_a_limit_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below that of pytest-timeout; but what somebody asks for, he gets."""
    monkeypatch.setattr(patience, "load_factor", lambda: 1000.0)
    assert scaled_s(1.0) == LONGEST_S
    assert scaled_s(LONGEST_S - 1) == LONGEST_S
    assert scaled_s(LONGEST_S + 1) == LONGEST_S + 1


def test_waiting_looks_until_it_is_true() -> None:
    looks = iter([False, 0, "yes"])
    wait_until(lambda: next(looks), "a yes")
    assert list(looks) == []


def test_waiting_gives_up_and_says_for_what() -> None:
    with pytest.raises(AssertionError, match=r"the moon: not within 0 s"):
        wait_until(lambda: False, "the moon", within_s=0.05)
