"""Runs whose replicas share the optimizer's state, and stop, die and go on like one process."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_support.faulty_runs import Fault, faulty_rank
from integration_support.short_runs import (
    NUMBERS,
    Steps,
    open_trainer,
    prepare_words,
    tiny_config,
    train_steps,
    worst_difference,
)
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.process import RankReport, ResilientRanks
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import CheckpointConfig, Config, ParallelConfig

STEPS = 5
PRELOAD = ["pcomm.integration.train.resilient", "torch._dynamo"]


def config(parallel: ParallelConfig) -> Config:
    # A small learning rate, see test_uneven_replicas.
    keys = {"learning_rate": 1e-5, "warmup_steps": 1, "eval_every": "none"}
    # Else each rank measures what this machine can do.
    keys["peak_tflops"] = 0.5
    # Rows for two replicas, and for three.
    sizes = {"sequence_length": 64, "global_batch_tokens": 12 * 64}
    base = tiny_config(parallel, **{"steps": STEPS, **keys, **sizes})
    return dataclasses.replace(base, checkpoint=CheckpointConfig(every=2))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run(
    parallel: ParallelConfig,
    run_dir: Path,
    faults: Sequence[Fault],
    hosts: Mapping[int, str] | None = None,
) -> dict[int, RankReport]:
    """How the ranks of a run with faults have ended."""
    number = int(parallel.dp) * parallel.cp * parallel.tp
    with ResilientRanks(number, preload=PRELOAD) as processes:
        processes.start(partial(faulty_rank, hosts=hosts), (config(parallel), run_dir, *faults))
        return processes.wait(timeout_s=scaled_s(PATIENCE_S))


def shard(copies: int, **sizes: int) -> ParallelConfig:
    return ParallelConfig(data="shard", copies=copies, **sizes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The run on one process."""
    run_dir = prepare_words(tmp_path_factory.mktemp("alone"), documents=40)
    return train_steps(config(ParallelConfig()), run_dir, torch.float64, STEPS)


PLAIN = ParallelConfig(dp=2)


def stop_after(step: int) -> Fault:
    """Rank 1 is asked to stop in a step, after which all save."""
    return Fault(rank=1, step=step - 1, number=signal.SIGINT)


@pytest.mark.parametrize(
    ("runs", "generations"),
    [
        # A death in backward, and one behind the step and before the checkpoint.
        ([(shard(2, dp=3), [Fault(1, 1), Fault(0, 3, "save")])], [0, 1, 1, 1, 2]),
        # The only owner of some units: back to the checkpoint of the second step.
        ([(shard(1, dp=2), [Fault(1, 3)])], [0, 0, 1, 1, 1]),
        pytest.param(
            [(shard(2, dp=2, tp=2), [stop_after(3)]), (shard(2, dp=3), [Fault(0, 3)])],
            [0, 0, 0, 1, 1],
            marks=pytest.mark.soak,
        ),
        # Without owners, with owners and a death among them, with others, and without again.
        (
            [
                (PLAIN, [stop_after(1)]),
                (shard(2, dp=2, tp=2), [Fault(2, 1), stop_after(3)]),
                (shard(1, dp=1, cp=2), [stop_after(4)]),
                (PLAIN, []),
            ],
            [0, 1, 1, 0, 0],
        ),
    ],
    ids=["deaths", "back", "other ranks", "with owners and without"],
)
def test_it_learns_what_one_process_learns(runs, generations, alone, tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    for parallel, faults in runs:
        reports = run(parallel, run_dir, faults)
        dead = {one.rank for one in faults if one.number == signal.SIGKILL}
        finished = {rank for rank, report in reports.items() if report.has_finished}
        assert finished == set(reports) - dead, [r.reason for r in reports.values()]
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["generation"] for row in rows] == generations
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    expected = torch.tensor(alone.rows, dtype=torch.float64)
    assert float((found - expected).abs().max()) <= 1e-12
    last = newest(run_dir)
    assert last is not None
    assert last.step == STEPS
    with open_trainer(config(ParallelConfig()), run_dir, torch.float64) as trainer:
        views = trainer.shard_views()
        read(last, views)
        worst, where = worst_difference(views, alone.tensors)
    assert worst <= 1e-12, where


@pytest.mark.parametrize(
    ("hosts", "generation", "warned"),
    [
        # The host of two of four replicas is lost, which leaves a copy on each of the others.
        ("abab", 0, 1),
        # All are on one host: the same two had both copies of a part, so step 3 is done again.
        ("aaaa", 1, 0),
    ],
)
def test_copies_are_on_the_other_host_where_there_is_one(hosts, generation, warned, tmp_path):
    run_dir = prepare_words(tmp_path, documents=40)
    reports = run(shard(2, dp=4), run_dir, [Fault(0, 3), Fault(2, 3)], dict(enumerate(hosts)))
    finished = {rank for rank, report in reports.items() if report.has_finished}
    assert finished == {1, 3}, [r.reason for r in reports.values()]
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Where it goes back, maybe to the beginning: the rank that was writing a checkpoint has died.
    assert rows[2]["generation"] == generation
    # At the start on one host, and else when the other host is lost.
    told = "on 2 ranks of 1 host, or on more; the death of any 1 rank costs no step, and the loss"
    files = [run_dir / f"warnings.{rank}.txt" for rank in range(4)]
    found = [told in file.read_text() for file in files]
    assert found == [rank == warned for rank in range(4)]


def muon(asked: Config) -> Config:
    return dataclasses.replace(asked, train=dataclasses.replace(asked.train, optimizer="muon"))


def test_what_cannot_be_shared_is_refused_by_name():
    hybrid = ParallelConfig(dp=4, data="hybrid", shard_ranks=2)
    for asked, kind, found in (
        (config(hybrid), UnsupportedError, "parallel.data"),
        (config(dataclasses.replace(shard(2, dp=2), zero=2)), UnsupportedError, "parallel.zero"),
        (config(dataclasses.replace(shard(2, dp=2), zero=3)), UnsupportedError, "parallel.zero"),
        (muon(config(shard(2, dp=2))), UnsupportedError, "train.optimizer"),
        (config(ParallelConfig(dp=2, copies=3)), ConfigError, "parallel.copies"),
    ):
        with pytest.raises(kind, match=found):
            validate_resilient(asked, 4)
    with pytest.raises(ConfigError, match=r"parallel\.copies"):
        validate(config(shard(3, dp=2)), 2)
    found = validate_resilient(config(shard(3, dp=2)), 4).parallel
    assert (found.data, found.copies, found.zero) == ("shard", 3, 1)
