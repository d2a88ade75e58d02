"""The measured parts of the benchmark between processes: what they do, and never how long."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ntp_bench.kills import SETTINGS
from ntp_bench.state_moves import MOVES, moves_of_rank
from ntp_bench.steps import BY_HAND, CASES, SESSION, steps_of_rank
from pcomm.core.cli import main
from pcomm.core.testing import ranks


@ranks(4)
def test_steps_of_all_cases_and_their_bytes(rank: int) -> None:
    found = steps_of_rank(2, 12, 1, width=32)
    assert list(found) == list(CASES)
    is_lost = rank == 3
    for case, times in found.items():
        takes_part = not (is_lost and CASES[case][0])
        assert len(times.wall_us) == len(times.core_us) == int(takes_part)
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
            assert len(times.ours_us) == len(times.bare_us) == 1
    assert (found[MOVES[0]].moved is None) == (rank == 3)


def test_a_quick_run_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rows.csv"
    line = ["--quick", "--parts", "host,redistribute,recovery", "--csv", str(table)]
    assert main(["bench", "ntp", *line, "--debug"]) == 0
    assert capsys.readouterr().out.count("a rank was killed") == len(SETTINGS)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["benchmark"] for row in rows} == {"ntp host", "ntp recovery", "ntp reshard"}
    lost = [row["value"] for row in rows if row["unit"] == "samples of all kills"]
    assert lost == ["0.0"] * len(SETTINGS)
    wrong = [row["value"] for row in rows if row["unit"] == "ranks with a wrong value"]
    assert wrong == ["0.0"] * len(MOVES)
    parts = {row["case"].split(" @ ")[0] for row in rows if row["unit"].startswith("ms of the")}
    assert parts == {"detect", "agree", "open groups", "build", "reshard", "step"}
