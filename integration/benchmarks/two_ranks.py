"""Tokens per second of two ranks with one thread each against one process with two threads.

    python integration/benchmarks/two_ranks.py --csv docs/benchmarks/integration.csv

Both train the quick-start GPT on the same global batches, through the Trainer. They take turns of
a few steps, and the losses of a turn must agree before its times count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from training_step import random_corpus

from pcomm.core import connect
from pcomm.core.process import LocalRanks
from pcomm.integration import Trainer, build_model, open_run_groups, recipes, validate
from pcomm.integration.data.batches import TrainBatches

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "packages" / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row
from core_bench.runner import compare, run_benchmark, take_turns

ROUNDS = 7
STEPS = 5
ONE, TWO = "one process, two threads", "two ranks, one thread"


def train() -> list[tuple[float, float]]:
    """Loss and milliseconds of each step, on one rank of whatever world there is."""
    with connect() as world:
        config = validate(recipes.quickstart(), world.size)
        corpus = random_corpus(config.data.vocabulary, config.train.sequence_length, 1 << 12)
        batches = TrainBatches(
            corpus,
            seed=0,
            sequence_length=config.train.sequence_length,
            global_batch_tokens=config.train.global_batch_tokens,
        )
        with open_run_groups(config, world) as groups:
            model = build_model(config, groups, world.device)
            trainer = Trainer(model, groups, config, batches)
            rows = [trainer.step(index).row for index in range(STEPS)]
    return [(row["loss"], row["step_ms"]) for row in rows]


def turn(ranks: LocalRanks) -> tuple[list[float], float]:
    """Losses, and microseconds of a step after the first, of one turn."""
    found = ranks.run(train, timeout_s=300)[0]
    times_us = [ms * 1e3 for _, ms in found[1:]]
    return [loss for loss, _ in found], sum(times_us) / len(times_us)


def measure() -> Sequence[Row]:
    """Both in turns."""
    losses: dict[str, list[float]] = {}
    with LocalRanks(1, threads=2) as one, LocalRanks(2, threads=1) as two:

        def of(case: str, ranks: LocalRanks) -> float:
            losses[case], time_us = turn(ranks)
            worst = max(abs(a - b) for a, b in zip(losses[case], losses[ONE], strict=True))
            assert worst < 1e-3, f"losses {losses}"
            return time_us

        turns = {ONE: lambda: of(ONE, one), TWO: lambda: of(TWO, two)}
        found = take_turns(turns, ROUNDS, warm_up=False)
    return compare("two_ranks", found[TWO], found[ONE])


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
