"""A step counted on one process, beside the same step of real ranks as torch's allocator saw it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from integration_support.short_runs import prepare_words, tiny_config
from pcomm.core import connect
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.testing import ranks
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.forecast.counted_step import CountedStep, count_step
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train.loop import batches_of
from pcomm.integration.train.trainer import Trainer

# Large enough that small vectors and what kernels need for a moment are few of the bytes.
SIZES = {"width": 64, "mlp_width": 192, "layers": 3}
TRAIN = {"sequence_length": 64, "global_batch_tokens": 2048}
# Recurrent layers are made of more operations, and keep more.
FEWER = {"sequence_length": 64, "global_batch_tokens": 512}
EXPERTS = {"experts": 4, "experts_per_token": 2}
ALONE = {
    "attention": tiny_config(model=SIZES, **TRAIN),
    "micro-batches": tiny_config(model=SIZES, micro_batch_tokens=512, **TRAIN),
    "all mixers in bf16": tiny_config(model={**SIZES, "pattern": "AGM"}, dtype="bf16", **FEWER),
    "tied, with experts": tiny_config(model={**SIZES, **EXPERTS, "tie_embeddings": True}, **TRAIN),
    "weights are most": tiny_config(model={**SIZES, "width": 256}, sequence_length=16),
}
SHORT = ("all mixers in bf16", "weights are most")
ON_TWO = {
    "replicas": ParallelConfig(),
    "zero 3": ParallelConfig(data="shard"),
    "zero 1": ParallelConfig(data="shard", zero=1),
    "tp": ParallelConfig(tp=2, sequence=True),
    "cp": ParallelConfig(cp=2, cp_strategy="heads"),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of documents longer than a row: attention is an operation for each other length."""
    return prepare_words(tmp_path_factory.mktemp("tokens"), documents=9, shortest=400)


def measured(config: Config, tokens: Path) -> tuple[CountedStep | None, int, dict[str, int]]:
    """What rank 0 counted, the most that torch had allocated, and bytes sent by group."""
    with connect() as world:
        resolved = validate(config, world.size)
        batches = batches_of(resolved, open_prepared(tokens))
        counted = count_step(resolved, batches) if world.rank == 0 else None
        with open_run_groups(resolved, world) as opened:
            spies: dict[str, SpyCollectives] = {}

            def spy(group):
                found = spies[group.key] = SpyCollectives(group.collectives)
                return found if group.size > 1 else group.collectives

            groups = opened.with_collectives(spy)
            model = build_model(resolved, groups, world.device)
            trainer = Trainer(model, groups, resolved, batches, compares=False)
            trainer.change(0)
            # Freed before the profiler looks, which does not know of them.
            trainer.replicas.zero_grad()
            for one in spies.values():
                one.clear()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                trainer.change(1)
            now = most = 0
            found = profiled.profiler.kineto_results.events()
            for event in sorted(found, key=lambda event: event.start_ns()):
                now += event.nbytes() if event.name() == "[memory]" else 0
                most = max(most, now)
            sent = {key: one.sent_bytes for key, one in spies.items() if one.sent_bytes}
            return counted, most, sent


def check(config: Config, tokens: Path) -> None:
    counted, most, sent = measured(config, tokens)
    if counted is not None:
        memory = counted.memory
        # Of ZeRO-1 it was 3 % more.
        assert memory.peak == pytest.approx(memory.weights + memory.optimizer + most, rel=0.05)
        assert {key: num for key, num in counted.sent().items() if num} == sent


@pytest.mark.parametrize(
    "case",
    # Of micro-batches and of experts, too, with the long tests.
    [pytest.param(case, marks=[pytest.mark.soak] * (case not in SHORT)) for case in ALONE],
)
def test_memory_alone(tokens, case):
    check(ALONE[case], tokens)


@pytest.mark.parametrize("case", ON_TWO)
@ranks(2)
def test_memory_and_traffic_of_two_ranks(rank, tokens, case):
    check(tiny_config(ON_TWO[case], model=SIZES, **TRAIN), tokens)


def test_weights_and_averages_are_those_of_the_parameters():
    """An oracle by hand, for what the profiler does not see."""
    config = validate(ALONE["weights are most"], 1)
    from pcomm.integration.forecast.dry_run import parameters_by_kind, synthetic_batches

    memory = count_step(config, synthetic_batches(config)).memory
    number = sum(parameters_by_kind(config).values())
    assert memory.weights == memory.all_gradients == 4 * number
    assert 8 * number <= memory.optimizer < 8 * number + 4096
    assert torch.get_default_dtype() == torch.float32
