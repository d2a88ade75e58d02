"""`pcomm train` with sequences shared by two ranks gives the numbers of one process.

Attention alone, and a hybrid of all mixers; `test_parallel_losses` has each of them alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from integration_support.short_runs import allowed_by_rounding, assert_same_numbers, settings
from pcomm.integration.checkpoint.folders import checkpoints

Train = Callable[..., int]

# A micro-batch is one row, so that what the ranks share is cut inside a document.
SETTINGS = {
    "model.layers": "4",
    "model.mamba_groups": "2",
    "model.mamba_state_dim": "16",
    "train.steps": "4",
    "train.sequence_length": "64",
    "train.micro_batch_tokens": "64",
    "train.eval_every": "4",
    "checkpoint.every": "2",
    "sample.max_tokens": "0",
}


@pytest.mark.parametrize("pattern", [pytest.param("A", marks=pytest.mark.soak), "GMGA"])
def test_cp_2_gives_the_numbers_of_one_process(train, tmp_path, pattern):
    one, two, sums = (tmp_path / name for name in ("one", "two", "sums"))
    shared = settings(SETTINGS, f"model.pattern={pattern}")
    assert train(one, *shared) == 0
    assert train(sums, *shared, "--set", "train.micro_batch_tokens=256") == 0
    allowed = allowed_by_rounding(one, sums)
    assert train(two, *shared, "--ranks", "2", "--set", "parallel.cp=2") == 0
    assert_same_numbers(two, one, allowed)
    if pattern == "GMGA":
        # What two ranks saved half-way is read by one, which goes on to the same end.
        shutil.rmtree(checkpoints(two)[-1].folder)
        assert [checkpoint.step for checkpoint in checkpoints(two)] == [2]
        assert train(two, *shared) == 0
        assert_same_numbers(two, one, allowed)
