"""The part of the benchmark that says whether the operations are right, without a time."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_bench.on_host import check_emulated


def test_emulated_ranks_are_right_and_have_no_times() -> None:
    told = check_emulated(2)
    assert told == "emulated, 2 ranks: 12 findings, all right"
