"""With whole parameters on every rank, each gradient is summed once a step, block by block."""

from __future__ import annotations

import pytest
import torch

from integration_support.short_runs import open_trainer, tiny_config
from pcomm.core.collectives import SpyCollectives
from pcomm.core.testing import ranks
from pcomm.integration.config.sections import ParallelConfig

UNITS = {
    False: ["(root)", "blocks.0", "blocks.1", "head"],
    # One weight cannot be in two units.
    True: ["(root)", "blocks.0", "blocks.1"],
}


@pytest.mark.parametrize("is_tied", UNITS, ids=["own head", "tied head"])
@ranks(2)
def test_a_step_sums_each_gradient_once(rank, is_tied, run_dir):
    model = {"tie_embeddings": is_tied}
    # A rank's share of the batch is computed in two micro-batches.
    config = tiny_config(ParallelConfig(dp=2), model=model, micro_batch_tokens=64)
    with open_trainer(config, run_dir, torch.float32) as trainer:
        plans = trainer.replicas.sharded.plans
        assert [plan.unit for plan in plans] == UNITS[is_tied]
        trainer.step(0)
        assert all(plan.gather.is_identity and plan.reduce.is_identity for plan in plans)
        [replicas] = {id(plan.replicate): plan.replicate for plan in plans}.values()
        spy = replicas.collectives = SpyCollectives(replicas.collectives)
        trainer.step(1)
        assert [call.operation for call in spy.calls] == ["all_reduce"] * len(plans)
        num_bytes = sum(call.input_bytes for call in spy.calls)
        assert num_bytes == sum(plan.gradient_bytes for plan in plans)
        # Padding aligns each buffer, and is no more than that.
        num_parameters = sum(p.numel() for p in trainer.replicas.sharded.parameters())
        assert 0 <= num_bytes - 4 * num_parameters < 256 * len(plans)
