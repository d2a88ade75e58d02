"""The table of thresholds: what is refused in its rows and bands, and a band of one's own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.table import OPERATIONS, Band, Table, Threshold

ROW = Threshold("p2p", 64, 4, 8, "by hand")
BAND = Band(("sm_90",), ("all_reduce",), (2, 8), (ROW,))


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"max_bytes": -1}, "max_bytes=-1", "from 0 on"),
        ({"algorithm": "lamprot"}, "algorithm 'lamprot'", "'lamport'"),
        ({"num_blocks": 0}, "num_blocks=0", "1 to 32"),
        ({"num_blocks": 33}, "num_blocks=33", "1 to 32"),
        ({"num_warps": 3}, "num_warps=3", "16"),
        ({"algorithm": "dist"}, "num_blocks=4, num_warps=8 for dist", "0 for both"),
    ],
)
def test_a_row_is_a_launch(changes: dict[str, Any], found: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="A row is a launch") as problem:
        replace(ROW, **changes)
    assert found in problem.value.found
    assert fix in problem.value.fix


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"operations": ("all_gather",)}, "operation 'all_gather'", "'all_gather_v'"),
        ({"operations": ()}, "no operation", "at least one"),
        ({"architectures": ()}, "no architecture", "at least one"),
        ({"world_sizes": (4, 3)}, "world sizes 4 to 3", "from 2 on"),
        ({"world_sizes": (1, 2)}, "world sizes 1 to 2", "from 2 on"),
        ({"rows": (ROW, ROW)}, "after a row of p2p that is as large", "ascending"),
    ],
)
def test_each_row_of_a_band_is_reached(changes: dict[str, Any], found: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="has to be reached") as problem:
        replace(BAND, **changes)
    assert found in problem.value.found
    assert fix in problem.value.fix


def test_launches_up_to_the_pad_and_the_largest_block() -> None:
    for blocks, warps in product(range(-1, 40), range(-1, 40)):
        # torch's default pad has 32 blocks; a block has up to 1024 threads, in warps of 32.
        is_launch = 1 <= blocks <= 32 and (32 * warps) in (32, 64, 128, 256, 512, 1024)
        with nullcontext() if is_launch else pytest.raises(ConfigError):
            assert replace(ROW, num_blocks=blocks, num_warps=warps).num_warps == warps


def test_barriers_have_a_thread_for_each_rank() -> None:
    for name, warps, ranks in product(("lamport", "multimem", "p2p"), (1, 2, 4), range(2, 140)):
        row = Threshold(name, 64, 4, warps, "by hand")  # type: ignore[arg-type]
        # Thread r of a block waits for rank r; data without a barrier are waited for one by one.
        is_heard = name == "lamport" or ranks <= 32 * warps
        with nullcontext() if is_heard else pytest.raises(ConfigError, match="a thread for each"):
            Band(("sm_90",), ("all_reduce",), (2, ranks), (row,))


def test_the_bands_of_the_package_do_not_overlap() -> None:
    places = [
        (architecture, operation, ranks)
        for band in Table().bands
        for architecture, operation in product(band.architectures, band.operations)
        for ranks in range(band.world_sizes[0], band.world_sizes[1] + 1)
    ]
    assert len(set(places)) == len(places)


def test_a_band_of_ones_own_changes_no_other_place() -> None:
    shipped = Table()
    table = Table((BAND, *shipped.bands))
    for architecture, operation, ranks in product(
        ("sm_90", "sm_100", "emulated", "sm_120"), OPERATIONS, (2, 3, 8, 9, 72, 73)
    ):
        is_there = (architecture, operation) == ("sm_90", "all_reduce") and ranks <= 8
        rows = (ROW,) if is_there else shipped.rows(architecture, operation, ranks)
        assert table.rows(architecture, operation, ranks) == rows
    assert table.lines("sm_120", 8) == []
    assert table.lines("sm_90", 8)[1:] != shipped.lines("sm_90", 8)
    assert "all_reduce: p2p<=64:4x8" in table.lines("sm_90", 8)


def test_choices_need_no_torch() -> None:
    code = "import sys; from pcomm.nvls.policy import choose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
