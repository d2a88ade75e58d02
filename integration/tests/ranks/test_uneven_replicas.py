"""Replicas that have lost ranks train like one process, to the last digits.

The oracle is the dense model of this package on one process, which knows neither ranks nor units.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from integration_support.short_runs import (
    UNEVEN_SIZES,
    Steps,
    tiny_config,
    train_steps,
    worst_difference,
)
from pcomm.core.tensor_parallel import join_shards
from pcomm.core.testing import ranks
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.data import batches as batches_module
from pcomm.integration.data.batches import Batch, dealt_rows, padded
from pcomm.integration.train import trainer as trainer_module

# The second one has moments and parameters of the first.
STEPS = 2
# No multiple of the ranks that share tokens, so micro-batches are filled up.
ROW = 31
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"qk_norm": True, "attention_gate": True, "qkv_bias": True},
    "tied": {"tie_embeddings": True},
    "recurrent": {"pattern": "GM"},
    "hybrid": {"pattern": "GA"},
    "experts": {"experts": 4, "moe_every": 2, "shared_expert_width": 9, "shared_expert_gate": True},
}


def config(model: str, parallel: ParallelConfig | None = None, **train: Any) -> Config:
    """Nine rows, which no number of replicas here divides alike among its ranks."""
    # AdamW divides by the size of a gradient plus 1e-8: rounding of 1e-16 in one of that size moves
    # the parameter by 1e-8 of the learning rate, and many times that is still below 1e-12.
    keys = {"global_batch_tokens": 9 * ROW, "learning_rate": 1e-5, "warmup_steps": 1, **train}
    # Larger than usual, so that every gradient is far above what rounding leaves.
    shape = {**UNEVEN_SIZES, "init_std": 0.1, **{**MODELS, **SOAKED}[model]}
    return tiny_config(parallel, model=shape, steps=STEPS, sequence_length=ROW, **keys)


SOAKED: dict[str, dict[str, Any]] = {
    "many heads": {"heads": 11, "kv_heads": 11},
    # Shards of some MiB, above the sizes at which collectives change how they send.
    "wide": {"width": 512, "heads": 20, "kv_heads": 10, "head_dim": 32, "mlp_width": 2731},
}


@pytest.fixture(scope="module")
def single(run_dir: Path) -> dict[str, Steps]:
    """Steps of the dense model, which never touches torch.distributed."""
    return {
        model: train_steps(config(model, ParallelConfig()), run_dir, torch.float64, STEPS)
        for model in MODELS
    }


@pytest.fixture(scope="module")
def single_soaked(run_dir: Path) -> dict[str, Steps]:
    """The same of models that take longer."""
    return {
        model: train_steps(config(model, ParallelConfig()), run_dir, torch.float64, STEPS)
        for model in SOAKED
    }


def assert_as_alone(
    model: str, parallel: ParallelConfig, run_dir: Path, single: dict[str, Steps], **train: Any
) -> None:
    """Loss and norm of each step, then parameters and both averages of AdamW."""
    mine = train_steps(config(model, parallel, **train), run_dir, torch.float64, STEPS)
    rows = torch.tensor(mine.rows, dtype=torch.float64)
    expected = torch.tensor(single[model].rows, dtype=torch.float64)
    worst = float((rows - expected).abs().max())
    assert worst <= 1e-12, f"off by {worst:.2e} in loss and norm"
    worst, where = worst_difference(mine.views, single[model].tensors)
    assert worst <= 1e-12, f"off by {worst:.2e} in {where}"


SEVEN = ParallelConfig(dp=2, tp=4, failed=("dp=0,tp=2",))
SIX = ParallelConfig(dp=2, tp=4, failed=("dp=1,tp=0", "dp=1,tp=3"))
FIVE = ParallelConfig(dp=2, tp=3, failed=("dp=1,tp=1",))
NINE = ParallelConfig(dp=3, tp=4, failed=("dp=0,tp=1", "dp=1,tp=0", "dp=1,tp=2"))
FIFTEEN = ParallelConfig(dp=2, tp=8, failed=("dp=0,tp=5",))
# Ranks of cp meet by their place among those that are left, whichever these are.
CONTEXT = ParallelConfig(dp=2, cp=2, tp=2, failed=("dp=0,cp=0,tp=0", "dp=0,cp=1,tp=1"))
ON_SIX = {
    "context": CONTEXT,
    "context+sequence": dataclasses.replace(CONTEXT, sequence=True),
    "degrees 4 and 2": SIX,
    "degrees 4 and 2+sequence": dataclasses.replace(SIX, sequence=True),
}


@pytest.mark.parametrize("model", ["gpt", "recurrent"])
@ranks(5)
def test_degrees_three_and_two(rank, model, run_dir, single):
    assert_as_alone(model, FIVE, run_dir, single)


@ranks(7)
def test_degrees_three_and_four(rank, run_dir, single):
    assert_as_alone("tied", SEVEN, run_dir, single)


@ranks(5)
def test_tokens_that_do_not_divide_among_ranks(rank, run_dir, single):
    """A replica with 5 rows has micro-batches of 2, 2 and 1, each filled up for its ranks."""
    parallel = dataclasses.replace(FIVE, sequence=True)
    assert_as_alone("experts", parallel, run_dir, single, micro_batch_tokens=2 * ROW)


@ranks(6)
def test_context_parallel_ranks(rank, run_dir, single):
    assert_as_alone("hybrid", ON_SIX["context+sequence"], run_dir, single)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parallel", ON_SIX.values(), ids=ON_SIX)
@ranks(6)
def test_six_ranks(rank, parallel, model, run_dir, single):
    assert_as_alone(model, parallel, run_dir, single)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sequence", [False, True])
@ranks(7)
def test_seven_ranks(rank, sequence, model, run_dir, single):
    assert_as_alone(model, dataclasses.replace(SEVEN, sequence=sequence), run_dir, single)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@ranks(9)
def test_nine_ranks(rank, model, run_dir, single):
    """Three replicas, of the degrees three, two and four."""
    assert_as_alone(model, NINE, run_dir, single)


@pytest.mark.soak
@ranks(15)
def test_degrees_eight_and_seven(rank, run_dir, single_soaked):
    """Eleven heads and thirteen columns, which neither degree divides."""
    assert_as_alone("many heads", FIFTEEN, run_dir, single_soaked)


@pytest.mark.soak
@ranks(7)
def test_shards_of_a_real_size(rank, run_dir, single_soaked):
    assert_as_alone("wide", dataclasses.replace(SEVEN, sequence=True), run_dir, single_soaked)


@ranks(5)
def test_replicas_hold_the_same_bits(rank, run_dir):
    """Each has computed its own update, from sums and a norm that are alike everywhere."""
    steps = train_steps(config("hybrid", FIVE, clip_norm=0.5), run_dir, torch.float32, STEPS)
    everyone: list[Any] = [None] * 5
    dist.all_gather_object(everyone, steps.views)
    # Ranks 0 to 2 are the whole replica.
    whole = {
        name: view.tensor
        if view.param_layout.layout is None
        else join_shards(
            [own[name].tensor for own in everyone[:3]],
            view.param_layout.layout,
            dim=view.param_layout.dim,
        )
        for name, view in everyone[0].items()
    }
    assert worst_difference(steps.views, whole)[0] == 0


def first_rows(shares: Any) -> list[list[int]]:
    """A broken piece: a replica takes a row that is another's, and leaves out one of its own."""
    rows = dealt_rows(shares)
    rows[0][0] = rows[1][0]
    return rows


def with_targets(batch: Batch, multiple: int) -> Batch:
    """A broken piece: what fills up a batch is learnt."""
    filled = padded(batch, multiple)
    targets = filled.targets.copy()
    targets[len(batch.targets) :] = 1
    return dataclasses.replace(filled, targets=targets)


BREAKS = {
    "rows": (batches_module, "dealt_rows", first_rows),
    "filling": (trainer_module, "padded", with_targets),
}


@pytest.mark.parametrize("name", BREAKS)
@ranks(5)
def test_a_broken_piece_is_noticed(rank, name, run_dir, single):
    owner, attribute, broken = BREAKS[name]
    parallel = dataclasses.replace(FIVE, sequence=True)
    with patch.object(owner, attribute, broken), pytest.raises(AssertionError, match="off by"):
        assert_as_alone("tied", parallel, run_dir, single)
