"""The choice between one communicator and two; which way it goes is the machine's business."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_support.trainings import TOKENS, Block, SmallModel, open_two, roles_of
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp import separation as module
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.separation import Separation, measure_separation
from pcomm.fsdp.settings import CommPolicy

MEASURED = Separation("dp[gather]", "dp[reduce]", 0.1, 0.2, 0.3, 0.2, None)


def test_a_gain_of_three_percent_pays() -> None:
    assert MEASURED.pays
    assert not replace(MEASURED, separate_s=0.295).pays
    assert not replace(MEASURED, separate_s=0.4).pays
    assert "gain 33.3%, extra memory unknown; separate" in MEASURED.describe()


@ranks(2)
def test_all_ranks_measure_the_same(rank: int) -> None:
    with open_two() as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        found = measure_separation(
            gather,
            reduce,
            num_elements=1000,
            gather_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        numbers = [found.gather_s, found.reduce_s, found.shared_s, found.separate_s]
        assert min(numbers) > 0
        mine = torch.tensor(numbers, dtype=torch.float64)
        assert torch.equal(gather.collectives.all_reduce(mine, op="max"), mine)


@pytest.mark.parametrize("separate_s", [0.2, 0.4])
@ranks(2)
def test_the_plan_follows_what_was_measured(rank: int, separate_s: float) -> None:
    measured = replace(MEASURED, separate_s=separate_s)
    before = module.measure_separation
    module.measure_separation = lambda *_args, **_options: measured
    try:
        with open_two() as groups:
            roles = roles_of(groups)
            model = SmallModel()
            sharded = fully_shard(model, roles, units=[Block], comm=CommPolicy("auto"))
            chosen = roles.reduce if measured.pays else roles.gather
            assert all(plan.reduce is chosen for plan in sharded.plans)
            assert str(sharded.report()).count(measured.describe()) == 1
            spy = chosen.collectives = SpyCollectives(chosen.collectives)
            model.loss(TOKENS).backward()
            assert spy.counts["reduce_scatter"] == 5
            assert ("all_gather" in spy.counts) != measured.pays
    finally:
        module.measure_separation = before
