"""Sharded training gives the losses, the norms and the parameters of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from integration_support.short_runs import Steps, tiny_config, train_steps, worst_difference
from pcomm.core.testing import ranks
from pcomm.fsdp import Sharded
from pcomm.integration import replicas
from pcomm.integration.config.sections import Config, ParallelConfig

# The second one has averages and parameters of the first.
STEPS = 2
ROW = 64
# A replica of ranks that share each row has two of them; the replicas of others have four in all.
FEW, ROWS = 2, 4
MODEL = {"qk_norm": True, "mamba_groups": 2, "mamba_state_dim": 16, "moe_every": 1}
EXPERTS = {"experts": 4, "experts_per_token": 2, "balance_loss": 0.01}
# All mixers, and a model whose blocks all have experts.
MIXED = "GMA"
PATTERNS = {MIXED: {}, "experts": EXPERTS}
SOAKED = {"A": {}, "GGGA": {}}

SHARD = {"data": "shard"}
ON_TWO = {
    "zero3": ParallelConfig(dp=2, **SHARD),
    "zero2": ParallelConfig(dp=2, zero=2, **SHARD),
    "zero1": ParallelConfig(dp=2, zero=1, **SHARD),
    "cp2": ParallelConfig(cp=2, **SHARD),
    "tp2": ParallelConfig(tp=2, **SHARD),
    "replicas of one rank": ParallelConfig(dp=2, data="hybrid", shard_ranks=1),
}
ON_FOUR = {
    "zero3": ParallelConfig(dp=4, **SHARD),
    "zero1 x tp2": ParallelConfig(dp=2, tp=2, zero=1, **SHARD),
    "hybrid": ParallelConfig(dp=4, data="hybrid", shard_ranks=2),
    "cp2 x tp2+sequence": ParallelConfig(cp=2, tp=2, sequence=True, **SHARD),
}
WITH_EXPERTS = {
    "ep1": ParallelConfig(dp=2, cp=2, **SHARD),
    "ep4": ParallelConfig(dp=4, ep=4, **SHARD),
    "ep2 x tp2": ParallelConfig(dp=2, tp=2, ep=2, **SHARD),
    "hybrid ep2": ParallelConfig(dp=4, ep=2, data="hybrid", shard_ranks=2),
}


def rows_for(parallel: ParallelConfig) -> int:
    """Rows of a batch."""
    return FEW if parallel.cp > 1 and parallel.dp == "auto" else ROWS


def config(parallel: ParallelConfig, pattern: str, rows: int) -> Config:
    """The tiny recipe, with rows that are cut where no document ends if ranks share them."""
    letters = "A" if pattern == "experts" else pattern
    own = {**PATTERNS, **SOAKED}[pattern]
    shape = {**MODEL, **own, "pattern": letters, "layers": max(2, len(letters))}
    return tiny_config(
        parallel,
        model=shape,
        steps=STEPS,
        learning_rate=1e-2,
        sequence_length=ROW,
        global_batch_tokens=rows * ROW,
        micro_batch_tokens=(1 if parallel.cp > 1 or parallel.dp != "auto" else 2) * ROW,
    )


Single = dict[tuple[str, int], Steps]


def alone(run_dir: Path, runs: Iterable[tuple[str, int]]) -> Single:
    return {
        run: train_steps(config(ParallelConfig(), *run), run_dir, torch.float64, STEPS)
        for run in runs
    }


@pytest.fixture(scope="module")
def single(run_dir: Path) -> Single:
    """The runs on one process, with whole parameters, by their model and number of rows."""
    return alone(run_dir, [(MIXED, ROWS), (MIXED, FEW), ("experts", ROWS)])


@pytest.fixture(scope="module")
def single_soaked(run_dir: Path) -> Single:
    """The same of other models."""
    return alone(run_dir, [(name, rows) for name in SOAKED for rows in (ROWS, FEW)])


def assert_as_alone(parallel: ParallelConfig, run_dir: Path, single: Single, pattern: str) -> None:
    rows = rows_for(parallel)
    mine = train_steps(config(parallel, pattern, rows), run_dir, torch.float64, STEPS)
    expected = single[pattern, rows]
    off = (torch.tensor(mine.rows) - torch.tensor(expected.rows)).abs().max()
    assert off <= 1e-10, f"rows are off by {off:.1e}"
    worst, name = worst_difference(mine.views, expected.tensors)
    # Adam divides by the root of its second average, which magnifies rounding where that is small.
    assert worst <= 1e-9, f"{name} is off by {worst:.1e}"


# What two ranks do, too, or another division of four.
SOAKED_DIVISIONS = ("zero3", "zero1 x tp2", "ep2 x tp2")


def divisions(of: dict[str, ParallelConfig]) -> list[Any]:
    """Parameters of a test on four ranks, some of them with the mark of long ones."""
    marks = {name: [pytest.mark.soak] * (name in SOAKED_DIVISIONS) for name in of}
    return [pytest.param(of[name], id=name, marks=marks[name]) for name in of]


@pytest.mark.parametrize("parallel", ON_TWO.values(), ids=ON_TWO)
@ranks(2)
def test_two_ranks(rank, parallel, run_dir, single):
    assert_as_alone(parallel, run_dir, single, MIXED)


@pytest.mark.parametrize("parallel", divisions(ON_FOUR))
@ranks(4)
def test_four_ranks(rank, parallel, run_dir, single):
    assert_as_alone(parallel, run_dir, single, MIXED)


@pytest.mark.soak
@pytest.mark.parametrize("pattern", SOAKED)
@pytest.mark.parametrize("parallel", ON_TWO.values(), ids=ON_TWO)
@ranks(2)
def test_other_models(rank, parallel, pattern, run_dir, single_soaked):
    assert_as_alone(parallel, run_dir, single_soaked, pattern)


@ranks(2)
def test_experts_on_two_ranks(rank, run_dir, single):
    assert_as_alone(ParallelConfig(dp=2, ep=2, **SHARD), run_dir, single, "experts")


@pytest.mark.parametrize("parallel", divisions(WITH_EXPERTS))
@ranks(4)
def test_experts_on_four_ranks(rank, parallel, run_dir, single):
    assert_as_alone(parallel, run_dir, single, "experts")


def real_width(parallel: ParallelConfig) -> Config:
    """Experts whose shards are megabytes: core sends them between pairs of ranks."""
    small = config(parallel, "experts", ROWS)
    return dataclasses.replace(small, model=dataclasses.replace(small.model, width=512))


@pytest.fixture(scope="module")
def single_of_real_width(run_dir: Path) -> list[list[float]]:
    return train_steps(real_width(ParallelConfig()), run_dir, torch.float32, 2).rows


@ranks(2)
def test_experts_at_a_real_width_do_not_meet_the_messages_of_the_rest(
    rank, run_dir, single_of_real_width
):
    """Both scopes have the same ranks here, and so the same communicators."""
    asked = real_width(ParallelConfig(dp=2, **SHARD))
    mine = train_steps(asked, run_dir, torch.float32, 2)
    off = (torch.tensor(mine.rows) - torch.tensor(single_of_real_width)).abs().max()
    # Sums in fp32, in another order; a message of another operation leaves more than 1.
    assert off <= 1e-3, f"rows are off by {off:.1e}"


@ranks(2)
def test_a_norm_of_own_shards_alone_is_noticed(rank, run_dir, single):
    def own(sharded: Sharded, *_: object) -> torch.Tensor:
        gradients = [p.grad.as_subclass(torch.Tensor) for p in sharded.parameters()]
        return (
            torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        )

    with (
        patch.object(replicas, "global_norm", own),
        pytest.raises(AssertionError, match="rows are off"),
    ):
        assert_as_alone(ON_TWO["zero3"], run_dir, single, MIXED)
