"""Steps of models with experts on several ranks leave what they leave on one: numbers and weights.

The balance loss is strong here, so that a wrong share of it is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from integration_support.short_runs import (
    Steps,
    open_trainer,
    tiny_config,
    train_steps,
    worst_difference,
)
from pcomm.core.testing import ranks
from pcomm.fsdp import Scope
from pcomm.integration import parallelize as parallelize_module
from pcomm.integration import replicas
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.models import moe as moe_module
from pcomm.integration.models.moe import Dispatch

STEPS = 3
ROW = 64
# A replica of ranks that share each row has two of them; the replicas of others have four in all.
FEW, ROWS = 2, 4
MODELS = {
    "all": {"experts": 4, "shared_expert_width": 16},
    "every second": {"experts": 8, "experts_per_token": 3, "moe_every": 2},
    "hybrid": {"pattern": "GM", "experts": 4, "experts_per_token": 1, "mamba_groups": 2},
    "no balance loss": {"experts": 4, "balance_loss": 0.0},
}
ON_TWO = {
    "dp2": ParallelConfig(dp=2),
    "dp2 ep2": ParallelConfig(dp=2, ep=2),
    "tp2": ParallelConfig(tp=2),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "tp2+sequence": ParallelConfig(tp=2, sequence=True),
    "tp2+sequence ep2": ParallelConfig(tp=2, sequence=True, ep=2),
    "cp2": ParallelConfig(cp=2),
    "cp2 ep2": ParallelConfig(cp=2, ep=2),
}
ON_FOUR = {
    "dp4 ep2": ParallelConfig(dp=4, ep=2),
    "dp4 ep4": ParallelConfig(dp=4, ep=4),
    "cp4 ep4": ParallelConfig(cp=4, ep=4),
    "cp2 x dp2 ep2": ParallelConfig(cp=2, dp=2, ep=2),
    "tp2 x dp2 ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "tp2 x dp2 ep4": ParallelConfig(tp=2, dp=2, ep=4),
    "tp2+sequence x dp2 ep4": ParallelConfig(tp=2, dp=2, sequence=True, ep=4),
    "cp2 x tp2+sequence ep2": ParallelConfig(cp=2, tp=2, sequence=True, ep=2),
    "cp2 x tp2 ep1": ParallelConfig(cp=2, tp=2),
}


def run(
    parallel: ParallelConfig, kind: str, run_dir: Path, steps: int = STEPS, rows: int = ROWS
) -> Steps:
    return train_steps(config(parallel, kind, rows), run_dir, torch.float64, steps)


def config(parallel: ParallelConfig, kind: str, rows: int = ROWS) -> Config:
    """The tiny recipe with experts. Micro-batches differ between the arrangements on purpose."""
    model = {"balance_loss": 0.5, "mamba_state_dim": 16, "qk_norm": True, **MODELS[kind]}
    micro = ROW if parallel.cp > 1 or parallel.dp == 2 else "auto"
    train = {"steps": STEPS, "sequence_length": ROW, "learning_rate": 1e-2}
    sizes = {"global_batch_tokens": rows * ROW, "micro_batch_tokens": micro}
    return tiny_config(parallel, model=model, **sizes, **train)


Single = dict[tuple[str, int], tuple[list[list[float]], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def single(run_dir: Path) -> Single:
    """Runs on one process, which never touch torch.distributed, by model and number of rows."""
    runs = [*((kind, FEW if kind == "hybrid" else ROWS) for kind in MODELS), ("all", FEW)]
    found = {(kind, rows): run(ParallelConfig(), kind, run_dir, rows=rows) for kind, rows in runs}
    return {key: (one.rows, one.tensors) for key, one in found.items()}


def assert_as_alone(parallel: ParallelConfig, kind: str, run_dir: Path, single: Single) -> None:
    num_rows = FEW if parallel.cp > 1 and parallel.dp == "auto" else ROWS
    rows, tensors = single[kind, num_rows]
    mine = run(parallel, kind, run_dir, rows=num_rows)
    worst = float((torch.tensor(mine.rows) - torch.tensor(rows)).abs().max())
    assert worst <= 1e-10, f"losses and norms are off by {worst:.2e}"
    worst, name = worst_difference(mine.views, tensors)
    assert worst <= 1e-9, f"{name} is off by {worst:.2e}"


def test_the_models_differ_and_learn(single):
    """Otherwise equal numbers would say little."""
    losses = [rows[-1][0] for rows, _ in single.values()]
    assert len(set(losses)) == len(single) > len(MODELS)
    for rows, tensors in single.values():
        assert rows[-1][0] < rows[0][0] - 0.3
        averages = [t for name, t in tensors.items() if "exp_avg." in name and ".experts." in name]
        # Every expert of some layer has had tokens.
        assert any(all(expert.any() for expert in average) for average in averages)


# What only adds one division to another runs with the long tests.
SOAKED = ("tp2 ep2", "tp2+sequence", "dp4 ep4", "cp2 x dp2 ep2", "tp2 x dp2 ep2", "cp2 x tp2 ep1")
SOAKED += ("cp4 ep4", "tp2 x dp2 ep4")


def divisions(of: dict[str, ParallelConfig]) -> list[Any]:
    """Parameters of a test, some of them with the mark of long ones."""
    marks = {name: [pytest.mark.soak] if name in SOAKED else [] for name in of}
    return [pytest.param(of[name], id=name, marks=marks[name]) for name in of]


@pytest.mark.parametrize("parallel", divisions(ON_TWO))
@ranks(2)
def test_two_ranks(rank, parallel, run_dir, single):
    assert_as_alone(parallel, "all", run_dir, single)


@pytest.mark.parametrize("parallel", divisions(ON_FOUR))
@ranks(4)
def test_four_ranks(rank, parallel, run_dir, single):
    assert_as_alone(parallel, "all", run_dir, single)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("every second", "tp2 ep2"), ("hybrid", "cp2 ep2"), ("no balance loss", "dp2 ep2")],
)
@ranks(2)
def test_other_models(rank, name, kind, run_dir, single):
    assert_as_alone(ON_TWO[name], kind, run_dir, single)


@ranks(2)
def test_first_weights_are_parts_of_the_same_ones(rank, run_dir, single):
    """After no step at all, and not only equal in their effect."""
    whole = run(ParallelConfig(dp=2), "all", run_dir, 0)
    mine = run(ParallelConfig(dp=2, ep=2), "all", run_dir, 0)
    assert worst_difference(mine.views, whole.tensors)[0] == 0
    assert mine.tensors["model.blocks.0.mlp.experts.down"].shape[0] == 2
    assert len({float(t.sum()) for t in whole.tensors["model.blocks.0.mlp.experts.down"]}) == 4


@ranks(2)
def test_scopes_name_the_groups_of_every_parameter(rank, run_dir):
    for parallel, sizes in (
        (ParallelConfig(dp=2, ep=2), {"": (None, 2), "expert": (2, 1)}),
        (ParallelConfig(dp=2), {"": (None, 2), "expert": (1, 2)}),
        (ParallelConfig(tp=2), {"": (None, 1), "expert": (1, 2)}),
        (ParallelConfig(tp=2, ep=2), {"": (None, 1), "expert": (2, 1)}),
    ):
        with open_trainer(config(parallel, "all"), run_dir, torch.float64) as trainer:
            plans = trainer.replicas.sharded.plans
            spread = {plan.scope: plan.spread and plan.spread.size for plan in plans}
            assert {p.scope: (spread[p.scope], p.num_replicas) for p in plans} == sizes
            names = [name for plan in plans for name in plan.names]
            assert sorted(names) == sorted(n for n, _ in trainer.model.named_parameters())
            assert all((".experts." in n) == (p.scope == "expert") for p in plans for n in p.names)
            assert trainer.groups["tp"].size == parallel.tp


@ranks(2)
def test_a_model_without_experts_opens_no_groups_for_them(rank, run_dir):
    asked = tiny_config(ParallelConfig(dp=2))
    with open_trainer(asked, run_dir, torch.float32) as trainer:
        keys = {str(key) for key in trainer.groups}
        assert not any("expert" in key for key in keys)
        assert {plan.scope for plan in trainer.replicas.sharded.plans} == {""}
        assert "balance_loss" not in trainer.step(0).row


# What is replaced, by what, and where it must be noticed. Functions stand below.
def _mean_over_replicas(*arguments: Any, **options: Any) -> Scope:
    """A broken piece: gradients of experts are divided by the number of their replicas."""
    return Scope(*arguments, **{**options, "divisor": 2})


def _drop_an_expert(dispatch: Dispatch, y_ND: torch.Tensor) -> torch.Tensor:
    """A broken piece: on the second rank, what its first expert computed is lost."""
    first = int(dispatch.row_counts_e[0]) * (dispatch._collectives.rank == 1)
    return _BRING_BACK(dispatch, torch.cat([0 * y_ND[:first], y_ND[first:]]))


def _ignore(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """A broken piece: the balance loss has no gradient."""
    return x


def _keep_partial(model: object, collectives: object) -> None:
    """A broken piece: each tensor-parallel rank keeps its own part of the router's gradient."""


def _not_spread(*arguments: Any, **options: Any) -> Scope:
    """A broken piece: the norm counts a rank's experts as if every rank had them."""
    return Scope(*arguments, **{**options, "spread": None})


_BRING_BACK = Dispatch.bring_back
BREAKS = {
    "divisor": (parallelize_module, "Scope", _mean_over_replicas, "dp2"),
    "dropped tokens": (Dispatch, "bring_back", _drop_an_expert, "dp2 ep2"),
    "balance loss ignored": (moe_module, "with_side_loss", _ignore, "dp2 ep2"),
    "router's gradient partial": (replicas, "sum_partial_gradients", _keep_partial, "tp2"),
    "norm of one rank's experts": (parallelize_module, "Scope", _not_spread, "dp2 ep2"),
}


@pytest.mark.parametrize("name", BREAKS)
@ranks(2)
def test_a_broken_piece_is_noticed(rank, name, run_dir, single):
    owner, attribute, broken, parallel = BREAKS[name]
    with patch.object(owner, attribute, broken), pytest.raises(AssertionError, match="off by"):
        assert_as_alone(ON_TWO[parallel], "all", run_dir, single)
