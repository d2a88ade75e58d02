"""What a dry run says, beside steps of the same run: memory, and time of the processor.

    python integration/benchmarks/dry_run_beside_run.py --csv docs/benchmarks/forecast.csv

In each round the operations of a step are timed one by one, as the dry run does it, and then a step
of the run is made: what else the machine does meets both. Both times are of the processor, one
thread a rank, so waiting for other ranks is in neither. Memory is that of torch's allocator.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from pcomm.core import connect, run_local
from pcomm.integration.config.rules import validate
from pcomm.integration.config.toml import load_config
from pcomm.integration.forecast.counted_step import count_step
from pcomm.integration.forecast.dry_run import synthetic_batches
from pcomm.integration.forecast.machine import measured_machine, predict_step
from pcomm.integration.forecast.replay import Replay
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train.trainer import Trainer

# isort: split
from core_bench.runner import Row, row, run_benchmark

NAME = "dry_run_beside_run"
QUICK = ["train.global_batch_tokens=2048", "train.sequence_length=256"]
RUNS = {
    "GPT, 1 rank": (1, QUICK),
    "GPT in shards, 2 ranks": (2, [*QUICK, "parallel.data='shard'"]),
    "attention, GDN, Mamba-2 in bf16, cp 2": (
        2,
        [*QUICK, "parallel.cp=2", "model.pattern='AGM'", "model.layers=3", "train.dtype='bf16'"],
    ),
}
ROUNDS = 3


class Beside(NamedTuple):
    """Of each kind what was predicted, and what it was."""

    predicted_s: list[float]
    measured_s: list[float]
    counted_bytes: int
    allocated_bytes: int


def measure(overrides: list[str], num_ranks: int) -> Beside:
    """One run on the ranks of this world. Collective."""
    torch.set_num_threads(1)
    config = validate(load_config(None, overrides=overrides), num_ranks)
    batches = synthetic_batches(config)
    step = count_step(config, batches)
    predicted, found = [], []
    with connect() as world, open_run_groups(config, world) as groups:
        model = build_model(config, groups, world.device)
        trainer = Trainer(model, groups, config, batches, compares=False)
        trainer.change(0)
        for _ in range(ROUNDS):
            # Of two ranks each has a core of its own, here as in the dry run.
            machine = measured_machine(2, config.model.width)
            replay = Replay(2, limit_s=60.0)
            predicted.append(predict_step(step, machine, num_ranks, replay).computing_s)
            start = time.process_time()
            trainer.change(0)
            found.append(time.process_time() - start)
        states = [s for state in trainer.optimizer.state.values() for s in state.values()]
        own = sum(p.nbytes for _, p in trainer.replicas.named_parameters())
        own += sum(one.nbytes for one in states)
        # Freed before the profiler looks, which does not know of them.
        trainer.replicas.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer.change(1)
    now = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return Beside(predicted, found, step.memory.peak, own + most)


def runs() -> Sequence[Row]:
    """All runs."""
    rows: list[Row] = []
    for name, (num_ranks, overrides) in RUNS.items():
        print(name, "...", file=sys.stderr, flush=True)
        task = (overrides, num_ranks)
        if num_ranks == 1:
            found = measure(*task)
        else:
            found = run_local(measure, num_ranks, task, threads=1)[0]
        rows += rows_of(name, found)
    return rows


def rows_of(name: str, found: Beside) -> Sequence[Row]:
    """What was measured, and beside it what was predicted."""
    step = f"{name}: step"
    measured_ms = statistics.median(found.measured_s) * 1e3
    predicted_ms = statistics.median(found.predicted_s) * 1e3
    memory, mib = f"{name}: memory", 2.0**20
    share = found.counted_bytes / found.allocated_bytes
    return [
        row(NAME, step, measured_ms, "ms of the processor", ROUNDS),
        row(
            NAME,
            f"{step}, predicted",
            predicted_ms,
            "ms of the processor",
            ROUNDS,
            beside=(step, predicted_ms / measured_ms),
        ),
        row(NAME, memory, found.allocated_bytes / mib, "MiB at the peak"),
        row(
            NAME,
            f"{memory}, counted",
            found.counted_bytes / mib,
            "MiB at the peak",
            beside=(memory, share),
        ),
    ]


if __name__ == "__main__":
    run_benchmark(__doc__, runs)
