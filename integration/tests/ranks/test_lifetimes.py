"""A run that is over leaves nothing: no parameters, no communicators, no threads that poll."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
import torch.distributed as dist

from integration_support.short_runs import tiny_config, train_steps
from pcomm.core import connect
from pcomm.core.errors import ClosedError
from pcomm.core.testing import Living, left_behind, ranks
from pcomm.core.testing.assertions import num_parameters
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.parallelize import (
    build_model,
    open_run_groups,
    plan_sequences,
    shard_parameters,
)
from pcomm.integration.train.run import run_training

RUNS = 2


EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 32}


def config(parallel: ParallelConfig, *, dtype: str = "fp32", **model: object) -> Config:
    return tiny_config(parallel, model=model, steps=2, dtype=dtype)


KINDS = {
    "replicas": config(ParallelConfig(dp=2)),
    "tensor and sequence parallel": config(ParallelConfig(tp=2, sequence=True)),
    "context parallel": config(ParallelConfig(cp=2), pattern="GA"),
    "experts": config(ParallelConfig(dp=2, ep=2), **EXPERTS),
    "shards": config(ParallelConfig(dp=2, data="shard")),
    "shards of stage 1 in bf16": config(ParallelConfig(dp=2, data="shard", zero=1), dtype="bf16"),
    "shards of experts": config(ParallelConfig(dp=2, data="shard"), **EXPERTS),
}


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_nothing_lives_on_after_training(rank, kind, run_dir):
    # Each rank connects to the other once, which makes torch's own threads.
    dist.barrier()
    before = Living.now()
    assert before.gloo_threads
    for _ in range(RUNS):
        train_steps(KINDS[kind], run_dir, torch.float32, 2)
        left = left_behind(before)
        assert left == []
        assert num_parameters() == 0


@ranks(2)
def test_nothing_lives_on_after_a_whole_run(rank, run_dir, tmp_path):
    """With checkpoints, metrics, evaluation and a trace."""
    data = dataclasses.replace(recipes.tiny().data, path=(str(run_dir / "text" / "*.txt"),))
    whole = dataclasses.replace(KINDS["replicas"], data=data)
    dist.barrier()
    before = Living.now()
    for number in range(RUNS):
        out = tmp_path / f"run{number}"
        outcome = run_training(whole, out, stream=io.StringIO(), trace=tmp_path / "trace.json")
        assert outcome.steps == 2
        left = left_behind(before)
        assert left == []
        assert num_parameters() == 0


@ranks(2)
def test_closed_groups_let_go_of_a_model_that_is_still_there(rank):
    dist.barrier()
    before = Living.now()
    with connect() as world:
        resolved = validate(KINDS["replicas"], world.size)
        with open_run_groups(resolved, world) as groups:
            model = build_model(resolved, groups, world.device)
            sharded = shard_parameters(model, resolved, groups)
            tokens = torch.arange(8)
            model(tokens, plan_sequences(model, (0, 8))).sum().backward()
            assert all(p.grad is not None for p in sharded.parameters())
    with pytest.raises(ClosedError):
        # No hook is left that would ask a closed group to add.
        model(tokens, plan_sequences(model, (0, 8)))
    del sharded, groups
    left = left_behind(before)
    assert left == []


@ranks(2)
def test_groups_that_stay_open_do_not_keep_a_model(rank):
    with connect() as world:
        resolved = validate(KINDS["replicas"], world.size)
        with open_run_groups(resolved, world) as groups:
            for _ in range(RUNS):
                model = build_model(resolved, groups, world.device)
                shard_parameters(model, resolved, groups)
                del model
                assert num_parameters() == 0
