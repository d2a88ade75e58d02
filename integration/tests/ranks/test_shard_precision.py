"""In bf16, shards travel with 2 bytes a parameter, and train as whole parameters do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from integration_support.short_runs import open_trainer, tiny_config, train_steps
from pcomm.core.collectives import SpyCollectives
from pcomm.core.testing import assert_as_accurate, assert_equal, ranks
from pcomm.fsdp import Precision
from pcomm.integration import precision as precision_module
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.parallelize import ALL_RANKS
from pcomm.integration.train.trainer import Trainer

STEPS = 2
ROW = 64
EXPERTS = {"experts": 4, "experts_per_token": 2, "balance_loss": 0.01, "moe_every": 1}
MIXERS = {"mamba_groups": 2, "mamba_state_dim": 16, "qk_norm": True}
MODELS = {
    # No size of a matrix is that of a micro-batch, by which one test tells them apart.
    "A": {"pattern": "A", "layers": 3, "mlp_width": 96},
    "GGGA": {"pattern": "GGGA", "layers": 4, **MIXERS},
    "M": {"pattern": "M", "layers": 2, **MIXERS},
    "experts": {"pattern": "A", "layers": 2, **EXPERTS},
    "tied": {"pattern": "A", "layers": 2, "tie_embeddings": True},
}
WHOLE = ParallelConfig(dp=2)
SHARD = ParallelConfig(dp=2, data="shard")
# What they keep whole, and scopes of one rank, which gather from no other.
OTHERS = {
    "zero2": ("GGGA", {"zero": 2}),
    "zero1": ("GGGA", {"zero": 1}),
    "replicas of one rank": ("GGGA", {"data": "hybrid", "shard_ranks": 1}),
    "experts of one rank": ("experts", {"ep": 2}),
}


def config(
    name: str, parallel: ParallelConfig, dtype: str = "bf16", micro: int | str = ROW
) -> Config:
    return tiny_config(
        parallel,
        model=MODELS[name],
        dtype=dtype,
        steps=STEPS,
        learning_rate=1e-2,
        sequence_length=ROW,
        micro_batch_tokens=micro,
    )


@pytest.fixture
def exact(name: str, run_dir: Path) -> list[list[float]]:
    """Losses and norms in fp64, of one process."""
    alone = config(name, ParallelConfig(), "fp32", "auto")
    return train_steps(alone, run_dir, torch.float64, STEPS).rows


@contextmanager
def trainer_of(
    name: str, parallel: ParallelConfig, run_dir: Path, dtype: str = "bf16"
) -> Iterator[Trainer]:
    """A trainer whose steps have one micro-batch: each gradient is a sum of two, in any order."""
    with open_trainer(config(name, parallel, dtype, "auto"), run_dir, torch.float32) as trainer:
        yield trainer


def first_gradients(name: str, parallel: ParallelConfig, run_dir: Path) -> dict[str, Tensor]:
    """Whole gradients of the first step, and the nats of this rank's tokens."""
    with trainer_of(name, parallel, run_dir) as trainer:
        nats = trainer.accumulate(0).nats
        return {**trainer.replicas.sharded.full_gradients(), "nats": nats}


def assert_first_gradients_of_autocast(name: str, run_dir: Path, **how: object) -> None:
    whole = dataclasses.replace(WHOLE, ep=how.get("ep", 1))
    shard = dataclasses.replace(SHARD, **how)
    mine, expected = (first_gradients(name, p, run_dir) for p in (shard, whole))
    assert mine.keys() == expected.keys()
    assert_equal(mine.pop("nats"), expected.pop("nats"))
    for key, gradient in expected.items():
        assert gradient.any(), key
        assert torch.equal(mine[key], gradient), f"gradient of {key} is another"


@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_the_first_gradients_are_those_of_autocast(rank, name, run_dir):
    """Bit for bit: whatever is rounded here is what autocast rounds with whole parameters."""
    assert_first_gradients_of_autocast(name, run_dir)


@pytest.mark.parametrize("other", OTHERS)
@ranks(2)
def test_the_same_with_other_shards(rank, other, run_dir):
    name, how = OTHERS[other]
    assert_first_gradients_of_autocast(name, run_dir, **how)


@ranks(2)
def test_decays_that_are_gathered_in_bf16_are_noticed(rank, run_dir):
    right = precision_module.names_used_in_bf16
    wrong = lambda model: right(model) | {"blocks.1.mixer.a_log"}  # noqa: E731
    with (
        patch.object(precision_module, "names_used_in_bf16", wrong),
        pytest.raises(AssertionError),
    ):
        assert_first_gradients_of_autocast("GGGA", run_dir)


@ranks(2)
def test_gradients_that_are_summed_in_bf16_are_noticed(rank, run_dir):
    wrong = Precision(torch.bfloat16, torch.bfloat16, casts_inputs=False)
    with (
        patch.object(precision_module, "_BF16", wrong),
        pytest.raises(AssertionError, match=r"gradient of .* is another"),
    ):
        assert_first_gradients_of_autocast("A", run_dir)


# Of experts the first gradients have the same bits, as above.
@pytest.mark.parametrize("name", ["GGGA", pytest.param("experts", marks=pytest.mark.soak)])
@ranks(2)
def test_losses_are_as_accurate_as_with_whole_parameters(rank, name, run_dir, exact):
    """With two micro-batches; beside training in fp64, and by the error of the replicated run."""
    mine, whole = (
        torch.tensor(train_steps(config(name, p), run_dir, torch.float32, STEPS).rows)
        for p in (SHARD, WHOLE)
    )
    assert_as_accurate(mine, whole, torch.tensor(exact, dtype=torch.float64))
    # The yardstick must be that of bf16: far above what fp32 rounds.
    assert (whole - torch.tensor(exact)).abs().max() > 1e-4


def is_rounded(name: str, num_dims: int, is_tied: bool) -> bool:
    """Matrices of linear layers and experts, told by their names and not by their modules."""
    in_fp32 = ("embedding.", "conv_weight", "router.", *(["head."] if is_tied else []))
    return num_dims >= 2 and not any(one in name for one in in_fp32)


def sent_in_a_step(trainer: Trainer) -> dict[str, int]:
    """Bytes that this rank puts into each kind of collective of a later step."""
    trainer.step(0)
    plans = trainer.replicas.sharded.plans
    spies = []
    for group in {id(g): g for plan in plans for g in (plan.gather, plan.reduce)}.values():
        spy = group.collectives = SpyCollectives(group.collectives)
        spies.append(spy)
    trainer.accumulate(1)
    sums = Counter[str]()
    for call in (call for spy in spies for call in spy.calls):
        sums[call.operation] += call.input_bytes
    return dict(sums)


@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_gathers_move_two_bytes_a_parameter(rank, name, run_dir):
    with trainer_of(name, SHARD, run_dir) as trainer:
        shapes, plans = trainer.replicas.sharded.shapes, trainer.replicas.sharded.plans
        num_blocks = len(trainer.model.blocks)
        sums = sent_in_a_step(trainer)
    narrow = [plan for plan in plans if plan.param_dtype == torch.bfloat16]
    wide = [plan for plan in plans if plan.param_dtype == torch.float32]
    rounded = {key for key in shapes if is_rounded(key, len(shapes[key]), name == "tied")}
    assert {key for plan in narrow for key in plan.names} == rounded
    assert len(narrow) + len(wide) == len(plans)
    assert all(plan.reduce_dtype == plan.main_dtype == torch.float32 for plan in plans)
    # What is rounded in forward and again in backward, the rest once; the root's stays, and so do
    # the last two blocks of forward, with which backward begins.
    stay = {"(root)", *(f"blocks.{number}" for number in range(num_blocks)[-2:])}
    gathered = sum(2 * plan.layout.shard_length * (1 + (plan.unit not in stay)) for plan in narrow)
    gathered += sum(4 * plan.layout.shard_length for plan in wide)
    assert sums == {
        "all_gather": gathered,
        "reduce_scatter": sum(4 * plan.layout.length for plan in plans),
    }
    if name == "A":
        with trainer_of(name, SHARD, run_dir, "fp32") as trainer:
            assert gathered < sent_in_a_step(trainer)["all_gather"]


def held_for_backward(trainer: Trainer) -> int:
    """Bytes of matrices, whole or rounded, that autograd keeps between forward and backward."""
    trainer.step(0)
    shapes = {shape for shape in trainer.replicas.sharded.shapes.values() if len(shape) == 2}
    shapes |= {shape[::-1] for shape in shapes}
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        if x.shape in shapes:
            saved.append(x.detach())
        return x

    batch = trainer.batches.batch(1, dp_rank=trainer.groups[ALL_RANKS].rank, dp_size=2, micro=0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        losses, _ = trainer._forward(batch)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert len(saved) >= 4 * len(trainer.model.blocks)
    losses.sum().backward()
    return sum(storages.values())


@ranks(2)
def test_backward_holds_no_rounded_copies(rank, run_dir):
    """What autocast rounds is kept for backward, and would stay whole while its shards come and go.

    The root's matrix and those of the last two blocks are there, gathered, and nothing else is.
    """
    with trainer_of("A", SHARD, run_dir) as trainer:
        held = held_for_backward(trainer)
        plans = {plan.unit: plan for plan in trainer.replicas.sharded.plans if plan.scope == ""}
        expected = [plans[unit].gathered_bytes for unit in ("(root)", "blocks.1", "blocks.2")]
        assert held == sum(expected)
    with (
        patch.object(precision_module, "_BF16", Precision(None, torch.float32)),
        trainer_of("A", SHARD, run_dir) as trainer,
    ):
        every = sum(plan.gathered_bytes for plan in plans.values())
        assert held_for_backward(trainer) >= every > held
