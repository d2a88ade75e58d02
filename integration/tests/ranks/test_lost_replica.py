"""A run whose replicas die whole and come back, by either rule for the rows of a lost one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from integration_support.faulty_runs import Fault, faulty_rank
from integration_support.short_runs import (
    NUMBERS,
    open_trainer,
    prepare_words,
    tiny_config,
    train_quietly,
)
from pcomm.core.errors import ConfigError
from pcomm.core.process import ResilientRanks
from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until
from pcomm.integration.checkpoint.folders import checkpoints
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import CheckpointConfig, Config, ParallelConfig
from pcomm.integration.data.batches import Batch, TrainBatches
from pcomm.integration.data.preparation import open_prepared

STEPS, ROW, ROWS = 7, 64, 12
PRELOAD = ["pcomm.integration.train.resilient", "torch._dynamo"]


def config(parallel: ParallelConfig, **changed: Any) -> Config:
    # A small learning rate, see test_uneven_replicas.
    keys = {"learning_rate": 1e-5, "warmup_steps": 1, "eval_every": "none"}
    # Else each rank measures what this machine can do.
    keys["peak_tflops"] = 0.5
    sizes = {"sequence_length": ROW, "global_batch_tokens": ROWS * ROW}
    base = tiny_config(parallel, **{"steps": STEPS, **keys, **sizes, **changed})
    return dataclasses.replace(base, checkpoint=CheckpointConfig(every=2))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class NextRows:
    """Batches of the next rows of the run, so many for each step; a stand-in for `TrainBatches`."""

    def __init__(self, run_dir: Path, counts: list[int]) -> None:
        self._counts = counts
        self._one_row = TrainBatches(
            open_prepared(run_dir).train, seed=0, sequence_length=ROW, global_batch_tokens=ROW
        )

    def batch(self, step: int, **_: Any) -> Batch:
        first = sum(self._counts[:step])
        rows = [self._one_row.batch(first + n) for n in range(self._counts[step])]
        ends = [0]
        for row in rows:
            ends += [ends[-1] + end for end in row.cu_seqlens[1:]]
        return Batch(
            np.concatenate([row.tokens for row in rows]),
            np.concatenate([row.targets for row in rows]),
            tuple(ends),
            sum(row.num_bytes for row in rows),
        )

    def num_targets(self, step: int) -> int:
        return int((self.batch(step).targets != -100).sum())

    def num_micro_batches(self, *_: Any, **__: Any) -> int:
        return 1


def alone(run_dir: Path, counts: list[int]) -> torch.Tensor:
    """`NUMBERS` of the steps of one process that reads so many rows in each."""
    asked = config(ParallelConfig(), steps=len(counts))
    # The schedule ends with the run.
    asked = dataclasses.replace(asked, train=dataclasses.replace(asked.train, steps=STEPS))
    with open_trainer(asked, run_dir, torch.float64) as trainer:
        trainer.batches = NextRows(run_dir, counts)  # type: ignore[assignment]
        rows = [trainer.step(step).row for step in range(len(counts))]
    return torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)


# In short runs one of two dies, for "absorb" in test_resilient_run, and one comes back below.
@pytest.mark.soak
@pytest.mark.parametrize("rule", ["absorb", "shrink"])
def test_two_replicas_die_one_after_the_other_and_one_comes_back(rule, tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    many = config(ParallelConfig(dp=3, lost_replica=rule))
    faults = (Fault(rank=1, step=1), Fault(rank=0, step=2, joins_at=3))
    with ResilientRanks(3, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (many, run_dir, *faults))
        processes.wait([0], timeout_s=scaled_s(PATIENCE_S))
        processes.join_again(0)
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    assert [rank for rank, report in reports.items() if report.has_finished] == [0, 2], reports
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    replicas = [row["replicas"] for row in rows]
    # Rank 0 is taken in behind the third or the fourth step, or before the last one goes on alone.
    assert [*replicas[:2], *replicas[4:]] == [3, *[2] * (STEPS - 3)]
    assert replicas[2:4] in ([1, 1], [1, 2], [2, 2])
    counts = [ROWS if rule == "absorb" else int(4 * one) for one in replicas]
    assert [row["rows"] for row in rows] == counts
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, alone(run_dir, counts), rtol=1e-12, atol=1e-12)


def test_a_replica_comes_back_rank_by_rank_and_a_plain_run_reads_on_where_it_ended(tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    shrinks = ParallelConfig(dp=2, tp=2, lost_replica="shrink")
    faults = (Fault(rank=2, step=1, joins_at=3), Fault(rank=3, step=1, joins_at=5, joins=2))
    with ResilientRanks(4, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (config(shrinks), run_dir, *faults))
        processes.wait([2, 3], timeout_s=scaled_s(PATIENCE_S))
        # Else the first of them may be there before the second one is missed.
        wait_until(lambda: any(row["replicas"] == 1 for row in rows_of(run_dir)), "a lost replica")
        processes.join_again(2)
        wait_until(lambda: rows_of(run_dir)[-1]["tp.1"] == 1, "a part of the replica")
        processes.join_again(3)
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    assert all(report.has_finished for report in reports.values()), reports
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # It counts as a replica as soon as a part of it is back.
    degrees = [row["tp.1"] for row in rows]
    assert [degree for degree, _ in itertools.groupby(degrees)] == [2, 0, 1, 2]
    counts = [int(row["rows"]) for row in rows]
    assert counts == [12 if degree else 6 for degree in degrees]
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, alone(run_dir, counts), rtol=1e-12, atol=1e-12)

    more = config(ParallelConfig(), steps=STEPS + 1)
    data = dataclasses.replace(more.data, path=(f"{run_dir}/text/*.txt",))
    batches: list[int] = []
    inner = TrainBatches.batch

    def seen(self: TrainBatches, step: int, **options: Any) -> Batch:
        batches.append(self.rows_before(step))
        return inner(self, step, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainBatches, "batch", seen)
        train_quietly(dataclasses.replace(more, data=data), run_dir)
    assert batches == [sum(counts)]


@pytest.mark.parametrize(
    ("rule", "dp"),
    [
        ("shrink", 2),
        pytest.param("shrink", 3, marks=pytest.mark.soak),
        pytest.param("absorb", 3, marks=pytest.mark.soak),
    ],
)
def test_steps_that_are_done_again_from_a_checkpoint_read_the_same_rows(
    rule: Literal["absorb", "shrink"], dp: int, tmp_path
):
    """A replica dies in the second step, and the second rank of each other one in the fourth.

    The ranks that are left have one half of each matrix, so that the job goes back to the
    checkpoint of the second step.
    """
    run_dir = prepare_words(tmp_path, documents=40)
    many = config(ParallelConfig(dp=dp, lost_replica=rule, tp=2))
    dying = range(3, 2 * dp, 2)
    faults = (Fault(0, 1), Fault(1, 1), *(Fault(rank, 3) for rank in dying))
    with ResilientRanks(2 * dp, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (many, run_dir, *faults))
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    finished = [rank for rank, report in reports.items() if report.has_finished]
    assert finished == list(range(2, 2 * dp, 2)), reports
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    counts = [int(row["rows"]) for row in rows]
    left = 12 if rule == "absorb" else 12 - 12 // dp
    assert counts == [12, *[left] * (STEPS - 1)]
    # At least the third and the fourth step are done again, by one rank of each replica.
    assert [row["tp.1"] for row in rows][2:] == [1] * (STEPS - 2)
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, alone(run_dir, counts), rtol=1e-12, atol=1e-12)


# No rank of the replica begins to save, so that they are one or two.
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_replica_that_dies_whole_in_a_save_costs_that_checkpoint_alone(tp, tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    many = config(ParallelConfig(dp=2, tp=tp, lost_replica="shrink"))
    # Of the replica that writes checkpoints.
    faults = [Fault(rank=rank, step=3, place="save") for rank in range(tp)]
    with ResilientRanks(2 * tp, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (many, run_dir, *faults))
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    finished = [rank for rank, report in reports.items() if report.has_finished]
    assert finished == list(range(tp, 2 * tp)), reports
    rows = rows_of(run_dir)
    counts = [int(row["rows"]) for row in rows]
    assert counts == [*[12] * 4, *[6] * 3]
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, alone(run_dir, counts), rtol=1e-12, atol=1e-12)
    # The one before, which is written beside the steps, may be half done when its rank dies.
    steps = [one.step for one in checkpoints(run_dir)]
    assert steps[-1] == STEPS
    assert 4 not in steps


def test_the_rule_is_that_of_a_resilient_run():
    asked = config(ParallelConfig(dp=2, lost_replica="shrink"))
    with pytest.raises(ConfigError, match=r"parallel\.lost_replica"):
        validate(asked, 2)
    assert validate_resilient(asked, 2).parallel.lost_replica == "shrink"


def test_of_spare_ranks_one_takes_the_place_of_a_rank_and_one_waits_until_the_end(tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    many = config(ParallelConfig(dp=2, tp=1, lost_replica="shrink"))
    faults = (Fault(rank=0, step=2), Fault(rank=2, step=4, place="row"))
    with ResilientRanks(5, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (many, run_dir, *faults))
        # They have asked for a place before one is free.
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    took = {rank for rank, report in reports.items() if report.result is not None}
    idle = {rank for rank, report in reports.items() if report.has_finished} - took
    # Processes 1 and, as rank 0, the spares in the order in which they asked.
    assert 1 in took
    assert len(took) + len(idle) in (3, 4)
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    counts = [int(row["rows"]) for row in rows]
    assert counts == [int(6 * row["replicas"]) for row in rows]
    assert counts[-1] == 12
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, alone(run_dir, counts), rtol=1e-12, atol=1e-12)
