"""Replicas that have lost ranks train like one process, to the last digits.

The oracle is the dense model of this package on one process, which knows neither ranks nor units.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pcomm.core.testing import ranks
from pcomm.integration.config import Config, ParallelConfig
from pcomm.integration.testing.short_runs import (
    Steps,
    tiny_config,
    train_steps,
    worst_difference,
)

STEPS = 3
ROW = 30
SIZES = {
    "layers": 2,
    "width": 16,
    "heads": 10,
    "kv_heads": 5,
    "head_dim": 4,
    "mlp_width": 13,
    "gdn_value_heads": 10,
    "mamba_heads": 10,
    "mamba_groups": 5,
    "mamba_state_dim": 4,
    # Larger than usual, so that every gradient is far above what rounding leaves.
    "init_std": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"qk_norm": True, "attention_gate": True, "qkv_bias": True},
    "tied": {"tie_embeddings": True},
    "gdn": {"pattern": "G"},
    "mamba": {"pattern": "M"},
    "hybrid": {"pattern": "GGGA", "layers": 4},
    "experts": {"experts": 4, "moe_every": 2, "shared_expert_width": 9, "shared_expert_gate": True},
}


def config(model: str, parallel: ParallelConfig | None = None, **train: Any) -> Config:
    """Nine rows, which no number of replicas here divides alike among its ranks."""
    # AdamW divides by the size of a gradient plus 1e-8: what rounding leaves in one of that size,
    # 1e-16, moves the parameter by 1e-8 of the learning rate.
    keys = {"global_batch_tokens": 9 * ROW, "learning_rate": 1e-4, "warmup_steps": 1, **train}
    return tiny_config(
        parallel, model={**SIZES, **MODELS[model]}, steps=STEPS, sequence_length=ROW, **keys
    )


@pytest.fixture(scope="module")
def single(run_dir: Path) -> dict[str, Steps]:
    """Steps of the dense model, which never touches torch.distributed."""
    return {
        model: train_steps(config(model, ParallelConfig()), run_dir, torch.float64, STEPS)
        for model in MODELS
    }


def compare(model: str, parallel: ParallelConfig, run_dir: Path, single: dict[str, Steps]) -> None:
    mine = train_steps(config(model, parallel), run_dir, torch.float64, STEPS)
    rows = torch.tensor(mine.rows, dtype=torch.float64)
    expected = torch.tensor(single[model].rows, dtype=torch.float64)
    worst = float((rows - expected).abs().max())
    assert worst <= 1e-12, f"off by {worst:.2e} in loss and norm"
    worst, where = worst_difference(mine.views, single[model].tensors)
    assert worst <= 1e-12, f"off by {worst:.2e} in {where}"


SEVEN = ParallelConfig(dp=2, tp=4, failed=("dp=0,tp=2",))


@pytest.mark.parametrize("model", MODELS)
@ranks(7)
def test_degrees_three_and_four(rank: int, model: str, run_dir: Path, single: dict) -> None:
    compare(model, SEVEN, run_dir, single)
