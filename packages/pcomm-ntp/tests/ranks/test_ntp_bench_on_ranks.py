"""The measured parts of the benchmark between processes: what they do, and never how long."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from pcomm.core.testing import ranks
from pcomm.ntp.bench.kills import SETTINGS, Kill, kill_ranks
from pcomm.ntp.bench.state_moves import MOVES, moves_of_rank
from pcomm.ntp.bench.step import BY_HAND, CASES, SESSION, steps_of_rank


@ranks(4)
def test_steps_of_all_cases_and_their_bytes(rank: int) -> None:
    found = steps_of_rank(2, 12, 1, width=32)
    assert list(found) == list(CASES)
    is_lost = rank == 3
    for case, times in found.items():
        takes_part = not (is_lost and CASES[case][0])
        assert len(times.wall_s) == len(times.core_s) == int(takes_part)
    # 4 blocks of 2 x 32 x 128 numbers in fp32, half of them on each rank.
    shard = 4 * 2 * 32 * 128 * 4 // 2
    assert found[BY_HAND].sent_bytes == found["whole"].sent_bytes == shard
    assert found[SESSION].sent_bytes == 0  # not counted
    # The one rank that is left of the second replica sums both halves.
    assert found["one rank lost"].sent_bytes == {0: shard, 1: shard, 2: 2 * shard, 3: 0}[rank]


@ranks(4)
def test_moved_state_is_right(rank: int) -> None:
    found = moves_of_rank(1, 1, 2)
    assert list(found) == list(MOVES)
    for times in found.values():
        assert times.is_right
        if times.moved is not None:
            assert times.moved.bytes_received == times.moved.bytes_least
            assert len(times.ours_s) == len(times.bare_s) == 1
    assert (found[MOVES[0]].moved is None) == (rank == 3)


def test_a_killed_rank_costs_no_step() -> None:
    told: list[Kill] = []
    (kill,) = kill_ranks(2, 1, SETTINGS[1][1], tell=told.append)
    assert told == [kill]
    assert kill.missing == 0
    assert kill.parts is not None
    assert sum(astuple(kill.parts)) == pytest.approx(kill.recovery.seconds)
