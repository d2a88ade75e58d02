"""Steps on several ranks give the losses of the same steps on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from integration_support.short_runs import tiny_config, train_steps
from pcomm.core.testing import ranks
from pcomm.fsdp import Sharded
from pcomm.gdn_cp import Plan, Spec
from pcomm.integration import recipes, replicas
from pcomm.integration.config.sections import Config, ParallelConfig

# Through the warm-up and a few more; the long run is for what grows slowly.
STEPS, LONG = 5, 20
# Enough for a wrong gradient to be seen in the losses.
CONTEXT_STEPS = 2
ON_TWO = {
    "dp2": ParallelConfig(dp=2),
    "tp2": ParallelConfig(tp=2),
    "tp2+sequence": ParallelConfig(tp=2, sequence=True),
}
ON_FOUR = {
    "dp4": ParallelConfig(dp=4),
    "tp2 x dp2": ParallelConfig(dp=2, tp=2),
    "tp2+sequence x dp2": ParallelConfig(dp=2, tp=2, sequence=True),
}
# A row of tokens that ranks share is cut inside a document, in every strategy that there is.
ON_TWO_CONTEXT = {
    f"cp2 {strategy}": ParallelConfig(cp=2, cp_strategy=strategy)
    for strategy in ("auto", "heads", "docs", "state", "gather")
}
ON_FOUR_CONTEXT = {
    "cp4": ParallelConfig(cp=4),
    "cp4 state": ParallelConfig(cp=4, cp_strategy="state"),
    "cp2 x dp2": ParallelConfig(cp=2, dp=2, cp_strategy="heads"),
    "cp2 x tp2": ParallelConfig(cp=2, tp=2, cp_strategy="docs"),
    "cp2 x tp2+sequence": ParallelConfig(cp=2, tp=2, sequence=True, cp_strategy="state"),
}
# Norms shared by heads are part of what has to agree, and groups that ranks share.
MODEL = {"qk_norm": True, "mamba_groups": 2, "mamba_state_dim": 16}
FP64, FP32 = torch.float64, torch.float32
# Every mixer, and so every strategy of each of them, in one model.
MIXED = "GMA"
# The pattern of the mixers, the dtype and the number of steps of what runs on one process.
SINGLE = [("A", FP64, STEPS), ("A", FP32, STEPS)]
SINGLE += [("GM", FP64, CONTEXT_STEPS)]
SINGLE += [(MIXED, FP64, CONTEXT_STEPS), (MIXED, FP32, CONTEXT_STEPS)]
SINGLE_LONG = [("A", FP64, LONG), ("A", FP32, LONG), ("GM", FP64, LONG)]
SINGLE_LONG += [(pattern, FP64, CONTEXT_STEPS) for pattern in ("M", "G", "GGGA")]
ROW = 64
Runs = dict[tuple[str, torch.dtype], list[list[float]]]


def config(parallel: ParallelConfig, pattern: str) -> Config:
    """The tiny recipe with longer rows, as many micro-batches as ranks allow."""
    dp = 1 if parallel.dp == "auto" else parallel.dp
    # Ranks that share rows take each alone, and two are enough.
    batch = 2 * ROW if pattern == MIXED else recipes.tiny().train.global_batch_tokens
    share = batch // dp
    micro = share if dp * parallel.tp > 2 else share // 2
    # Alone in its micro-batch, a row is cut where no document ends.
    micro = ROW if parallel.cp > 1 else micro
    model = {**MODEL, "pattern": pattern, "layers": max(2, len(pattern))}
    train = {"steps": LONG, "sequence_length": ROW, "learning_rate": 1e-2, "warmup_steps": 2}
    sizes = {"global_batch_tokens": batch, "micro_batch_tokens": micro}
    return tiny_config(parallel, model=model, **sizes, **train)


def losses(
    parallel: ParallelConfig, run_dir: Path, dtype: torch.dtype, pattern: str, steps: int
) -> list[list[float]]:
    """Loss and gradient norm of each step, on this rank of whatever world there is."""
    return train_steps(config(parallel, pattern), run_dir, dtype, steps).rows


def alone(run_dir: Path, runs: list[tuple[str, torch.dtype, int]]) -> Runs:
    return {
        (pattern, dtype): losses(ParallelConfig(), run_dir, dtype, pattern, steps)
        for pattern, dtype, steps in runs
    }


@pytest.fixture(scope="module")
def single(run_dir: Path) -> Runs:
    """Runs on one process, which never touches torch.distributed."""
    return alone(run_dir, SINGLE)


@pytest.fixture(scope="module")
def single_long(run_dir: Path) -> Runs:
    """More and longer ones."""
    return alone(run_dir, SINGLE_LONG)


def test_training_learns_something(single):
    """Otherwise equal losses would say little."""
    rows = single["A", FP64]
    assert rows[-1][0] < rows[0][0] - 1.0


def assert_as_alone(
    parallel: ParallelConfig,
    run_dir: Path,
    single: Runs,
    dtype: torch.dtype = FP64,
    pattern: str = "A",
) -> None:
    exact = torch.tensor(single[pattern, FP64], dtype=FP64)
    mine = torch.tensor(losses(parallel, run_dir, dtype, pattern, len(exact)), dtype=FP64)
    allowed = 1e-10
    if dtype == FP32:
        # The yardstick is how far the run on one process is from the exact one: the order of
        # additions differs, so the parallel run has rounding of its own, of the same size. Both
        # are one draw of what training makes of it, so there is room between them.
        in_fp32 = torch.tensor(single[pattern, FP32], dtype=FP64)
        allowed = 8 * float((in_fp32 - exact).abs().max())
    worst = float((mine - exact).abs().max())
    assert worst <= allowed, f"off by {worst:.2e}, allowed are {allowed:.2e}"


DIVISIONS = {**ON_TWO, **ON_FOUR, **ON_TWO_CONTEXT, **ON_FOUR_CONTEXT}
RUNS_ON_TWO = [
    *((name, FP64, "A") for name in ON_TWO),
    *((name, FP64, "GM") for name in ("dp2", "tp2+sequence")),
    *((name, FP64, MIXED) for name in ON_TWO_CONTEXT),
    ("cp2 auto", FP32, MIXED),
]
RUNS_ON_FOUR = [
    *((name, FP64, "A") for name in ON_FOUR),
    *((name, FP64, MIXED) for name in ON_FOUR_CONTEXT),
    ("tp2+sequence x dp2", FP32, "A"),
]
# Two ranks, or others of four, do these with as many groups.
SOAKED = ["dp4", "tp2 x dp2", "cp4 state", "cp2 x tp2"]


def marked(run: tuple[str, torch.dtype, str]) -> Any:
    """Parameters of a test, some of them with the mark of long ones."""
    name, dtype, _ = run
    is_soaked = name in SOAKED or (name in ON_FOUR and dtype == FP32)
    return pytest.param(*run, marks=[pytest.mark.soak] * is_soaked)


@pytest.mark.parametrize(("name", "dtype", "pattern"), RUNS_ON_TWO, ids=str)
@ranks(2)
def test_two_ranks(rank, name, dtype, pattern, run_dir, single):
    assert_as_alone(DIVISIONS[name], run_dir, single, dtype, pattern)


@pytest.mark.parametrize(("name", "dtype", "pattern"), [*map(marked, RUNS_ON_FOUR)], ids=str)
@ranks(4)
def test_four_ranks(rank, name, dtype, pattern, run_dir, single):
    assert_as_alone(DIVISIONS[name], run_dir, single, dtype, pattern)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("parallel", ON_TWO.values(), ids=ON_TWO)
@ranks(2)
def test_long_runs_on_two_ranks(rank, parallel, dtype, run_dir, single_long):
    assert_as_alone(parallel, run_dir, single_long, dtype)
    assert_as_alone(parallel, run_dir, single_long, pattern="GM")


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("parallel", ON_FOUR.values(), ids=ON_FOUR)
@ranks(4)
def test_long_runs_on_four_ranks(rank, parallel, dtype, run_dir, single_long):
    assert_as_alone(parallel, run_dir, single_long, dtype)


@pytest.mark.soak
@pytest.mark.parametrize("pattern", ["M", "G", "GGGA"])
@pytest.mark.parametrize("parallel", ON_TWO_CONTEXT.values(), ids=ON_TWO_CONTEXT)
@ranks(2)
def test_two_ranks_share_sequences_of_other_models(rank, parallel, pattern, run_dir, single_long):
    """The cheapest strategy depends on all mixers of a model."""
    assert_as_alone(parallel, run_dir, single_long, pattern=pattern)


def skip_partial_sum(model: object, collectives: object) -> None:
    """Norms under sequence parallelism keep each rank's own gradient."""


def local_norm(sharded: Sharded, layouts: object, tensor_parallel: object) -> torch.Tensor:
    """Every rank clips by the norm of its own part."""
    return sharded.grad_norm()


def drop_states(plan: Plan, spec: Spec, summary: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Sequences that go on on another rank begin anew there."""


def drop_halo(plan: Plan, spec: Spec, inputs: torch.Tensor) -> None:
    """The convolution does not see what came before on another rank."""


def count_from_zero(plan: Plan, spec: Spec, device: torch.device) -> torch.Tensor:
    """Each rank's tokens are counted from its first one."""
    return torch.arange(plan.tokens.num_tokens) % plan.tokens.local_tokens


BREAKS = {
    "partial": (replicas, "sum_partial_gradients", skip_partial_sum, "tp2+sequence", "A"),
    "norm": (replicas, "global_norm", local_norm, "tp2", "A"),
    "states": (Plan, "entry_states", drop_states, "cp2 state", MIXED),
    "halo": (Plan, "conv_halo", drop_halo, "cp2 state", MIXED),
    "positions": (Plan, "positions_of", count_from_zero, "cp2 heads", MIXED),
}


@pytest.mark.parametrize("name", BREAKS)
@ranks(2)
def test_a_broken_piece_is_noticed(rank, name, run_dir, single):
    owner, attribute, broken, parallel, pattern = BREAKS[name]
    with patch.object(owner, attribute, broken), pytest.raises(AssertionError, match="off by"):
        assert_as_alone(DIVISIONS[parallel], run_dir, single, pattern=pattern)
