"""One training step of the quick start's models in fp32 and in bf16.

    python integration/benchmarks/training_dtype.py --csv docs/benchmarks/integration.csv

A GPT, a hybrid of Gated DeltaNet and attention, and Mamba-2, each through the Trainer, one process,
one thread. Rounds take turns; times are those of the thread, without what other programs took.
`train.dtype = "auto"` takes bf16 where the processor has instructions for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from training_step import random_corpus

from pcomm.core import Groups, connect
from pcomm.core.process import World
from pcomm.integration import build_model, open_run_groups, recipes, validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.train.trainer import Trainer

# isort: split
from core_bench.rows import Row
from core_bench.runner import compare, run_benchmark, take_turns

MODELS = {"GPT": "A", "GGGA": "GGGA", "Mamba-2": "M"}
ROUNDS = 7


def trainer_of(pattern: str, dtype: str, world: World, held: ExitStack) -> Trainer:
    """A trainer of the quick start with other mixers, on random tokens."""
    base = recipes.quickstart()
    config = replace(
        base,
        model=replace(base.model, pattern=pattern),
        train=replace(base.train, dtype=dtype),
    )
    resolved = validate(config, 1)
    train = resolved.train
    batches = TrainBatches(
        random_corpus(config.data.vocabulary, train.sequence_length, 1 << 10),
        seed=0,
        sequence_length=train.sequence_length,
        global_batch_tokens=train.global_batch_tokens,
    )
    groups: Groups = held.enter_context(open_run_groups(resolved, world))
    return Trainer(build_model(resolved, groups, world.device), groups, resolved, batches)


def step_us(trainer: Trainer) -> float:
    """Microseconds that this thread computes in a step."""
    start = time.thread_time()
    trainer.step(3)
    return (time.thread_time() - start) * 1e6


def measure() -> Sequence[Row]:
    """Every model in both formats, in turns."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    with connect() as world, ExitStack() as held:
        turns = {
            f"{name}, {dtype}": trainer_of(pattern, dtype, world, held)
            for name, pattern in MODELS.items()
            for dtype in ("fp32", "bf16")
        }
        found = take_turns(
            {name: lambda one=one: step_us(one) for name, one in turns.items()}, ROUNDS
        )
    for name in MODELS:
        rows += compare("training_dtype", found[f"{name}, bf16"], found[f"{name}, fp32"])
    return rows


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
