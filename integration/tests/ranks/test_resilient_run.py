"""A run that loses a rank, and gets it back, learns what a run on one process learns."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    without_pictures,
    worst_difference,
)
from pcomm.core.errors import ConfigError, PcommError, TopologyError, UnsupportedError
from pcomm.core.process import RankReport, ResilientRanks
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.saver import NotFiniteError
from pcomm.integration.checkpoint.state import read
from pcomm.integration.commands.train import command
from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import CheckpointConfig, Config, ParallelConfig
from pcomm.integration.train.loop import Outcome
from pcomm.integration.train.resilient import ResilientRun

STEPS = 5
PRELOAD = ["pcomm.integration.train.resilient", "torch._dynamo"]
# The rank that writes the metrics.
FAULT = Fault(rank=0, step=2, joins_at=3)


def config(parallel: ParallelConfig) -> Config:
    # A small learning rate, see test_uneven_replicas.
    keys = {"learning_rate": 1e-5, "warmup_steps": 1, "eval_every": "none"}
    # Else each rank measures what this machine can do.
    keys["peak_tflops"] = 0.5
    base = tiny_config(parallel, steps=STEPS, **keys)
    return dataclasses.replace(base, checkpoint=CheckpointConfig(every=2))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def with_fault(number: int, asked: Config, run_dir: Path, fault: Fault) -> dict[int, RankReport]:
    """How the ranks of a run with a fault have ended."""
    with ResilientRanks(number, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (asked, run_dir, fault))
        return processes.wait(timeout_s=scaled_s(PATIENCE_S))


def last_step(run_dir: Path) -> int:
    last = newest(run_dir)
    assert last is not None
    return last.step


def assert_saved_as(alone: Steps, run_dir: Path) -> None:
    """Fail unless the last checkpoint has the tensors of the run on one process."""
    last = newest(run_dir)
    assert last is not None
    with open_trainer(config(ParallelConfig()), run_dir, torch.float64) as trainer:
        views = trainer.shard_views()
        read(last, views)
        worst, where = worst_difference(views, alone.tensors)
    assert worst <= 1e-12, where


def assert_rows_as(alone: Steps, rows: list[dict[str, Any]]) -> None:
    found = torch.tensor([[row[key] for key in NUMBERS] for row in rows], dtype=torch.float64)
    expected = torch.tensor(alone.rows, dtype=torch.float64)
    assert float((found - expected).abs().max()) <= 1e-12


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return prepare_words(tmp_path, documents=40)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The run on one process."""
    run_dir = prepare_words(tmp_path_factory.mktemp("alone"), documents=40)
    return train_steps(config(ParallelConfig()), run_dir, torch.float64, STEPS)


def test_a_rank_dies_in_backward_and_comes_back(alone, run_dir):
    many = config(ParallelConfig(dp=2, tp=2))
    with ResilientRanks(4, preload=PRELOAD) as processes:
        processes.start(faulty_rank, (many, run_dir, FAULT))
        died = processes.wait([FAULT.rank])[FAULT.rank]
        assert died.reason == "killed by SIGKILL"
        # Otherwise the others may take it in as they meet, before the third step.
        processes.place(1).store().wait(["pcomm/generation/1"])
        processes.join_again(FAULT.rank)
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
        # It comes back once more, and the others are through.
        processes.join_again(FAULT.rank)
        late = processes.wait([FAULT.rank], timeout_s=scaled_s(PATIENCE_S))[FAULT.rank]
    assert [report.reason for report in reports.values()] == ["finished"] * 4
    assert (late.reason, late.result) == ("finished", None)
    rows = rows_of(run_dir)
    # The step in which it died is there once; so is every other.
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # A new process is taken in at the end of a step, here the third or the fourth.
    ranks = [row["ranks"] for row in rows]
    assert ranks[:3] + ranks[4:] == [4, 4, 3, 4]
    assert [(row["tp.0"], row["tp.1"]) for row in rows] == [(n - 2, 2) for n in ranks]
    assert_rows_as(alone, rows)
    assert last_step(run_dir) == STEPS
    assert_saved_as(alone, run_dir)


def test_rows_and_samples_are_those_of_a_plain_run(run_dir):
    base = config(ParallelConfig(dp=2))
    keys = {"eval_every": 2, "sample_every": 2}
    asked = dataclasses.replace(base, train=dataclasses.replace(base.train, **keys))
    reports = with_fault(2, asked, run_dir, Fault(rank=0, step=STEPS + 1))
    assert [report.reason for report in reports.values()] == ["finished"] * 2, reports
    rows = rows_of(run_dir)
    steps = [row for row in rows if "loss" in row]
    for row in steps:
        assert 0 < row["mfu"] < 1
        assert row["mean_tokens_per_s"] > 0
        assert 0 < row["data_ms"] < row["step_ms"]
        assert row["peak_memory_mib"] > 10
    # The peak is that of both ranks, whatever this machine measures.
    (share,) = {round(row["mfu"] / row["mean_tokens_per_s"], 12) for row in steps}
    alone = dataclasses.replace(asked, parallel=ParallelConfig())
    with open_trainer(alone, run_dir, torch.float64) as trainer:
        flops = trainer.model.training_flops(asked.train.sequence_length)
    assert share == pytest.approx(flops / 2 / 0.5e12, rel=1e-3)
    evaluations = [row for row in rows if "bits_per_byte" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 5]
    assert all(row["eval_s"] > 0 for row in evaluations)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in samples] == [(2, "def"), (4, "def")]


def test_a_rank_that_has_no_partner_along_cp_any_more_waits_for_the_others(alone, run_dir):
    """Both groups along `cp` go on with the degree of the damaged one; rank 2 or 3 is idle."""
    many = config(ParallelConfig(cp=2, tp=2))
    reports = with_fault(4, many, run_dir, Fault(rank=1, step=2))
    assert [rank for rank, report in reports.items() if report.has_finished] == [0, 2, 3], reports
    rows = rows_of(run_dir)
    assert [(row["step"], row["ranks"], row["tp.0"]) for row in rows] == [
        (1, 4, 2),
        (2, 4, 2),
        *((step, 3, 1) for step in range(3, STEPS + 1)),
    ]
    assert_rows_as(alone, rows)


def test_a_rank_along_cp_that_is_left_alone_saves_before_the_run_ends(run_dir):
    alone = train_steps(config(ParallelConfig()), run_dir, torch.float64, 2)
    many = dataclasses.replace(
        config(ParallelConfig(cp=2)), checkpoint=CheckpointConfig(every="end")
    )
    # The one that writes checkpoints, if both live.
    reports = with_fault(2, many, run_dir, Fault(rank=0, step=2))
    assert isinstance(reports[1].error, TopologyError), reports[1]
    assert last_step(run_dir) == 2
    assert_saved_as(alone, run_dir)


@pytest.mark.parametrize(
    ("tp", "dies"),
    # The rank that writes; or, of two that have a half of each matrix, the other one.
    [(1, 0), pytest.param(2, 1, marks=pytest.mark.soak)],
)
def test_a_death_in_the_last_checkpoint_costs_neither_that_nor_the_evaluation(tp, dies, run_dir):
    base = config(ParallelConfig(dp=2, tp=tp))
    last_only = dataclasses.replace(
        base,
        checkpoint=CheckpointConfig(every="end"),
        train=dataclasses.replace(base.train, steps=2, eval_every=2),
    )
    reports = with_fault(2 * tp, last_only, run_dir, Fault(rank=dies, step=2))
    assert reports[dies].reason == "killed by SIGKILL"
    assert last_step(run_dir) == 2, reports[1 - dies]
    assert reports[1 - dies].result.bits_per_byte is not None


@pytest.mark.parametrize("place", ["row", "commit"])
def test_a_step_that_is_applied_has_its_row_although_the_writer_has_not_written_it(
    place, alone, run_dir
):
    """The rank that writes dies in between; or it alone hears of a failure after all are ready."""
    fault = Fault(rank=0, step=2, place=place)
    reports = with_fault(2, config(ParallelConfig(dp=2)), run_dir, fault)
    finished = [rank for rank, report in reports.items() if report.has_finished]
    assert finished == ([0, 1] if place == "commit" else [1]), reports
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # The row of the step with the fault was noted before it.
    assert [row["generation"] for row in rows] == [0, 0, 0, 1, 1]
    # A replica that is left alone reads the rows of both.
    assert_rows_as(alone, rows)


# Short runs go back to a checkpoint in test_lost_replica and test_owned_moments_run.
@pytest.mark.soak
def test_steps_that_are_repeated_from_a_checkpoint_have_one_row(run_dir):
    """Without another replica, what the dead rank held comes from the checkpoint, if it has one."""
    fault = Fault(rank=1, step=3)
    reports = with_fault(2, config(ParallelConfig(tp=2)), run_dir, fault)
    assert reports[1].reason == "killed by SIGKILL"
    assert reports[0].has_finished, reports[0]
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # At least the third step is done twice, the second time by one rank.
    assert [row["tp.0"] for row in rows][2:] == [1] * 3


def test_a_loss_that_is_not_finite_ends_the_run_as_it_was_before_the_step(run_dir):
    """It would be the same in each generation, so the ranks do not meet for another attempt."""
    base = config(ParallelConfig(dp=2))
    # The first step is finite, and what it makes of the weights overflows in the second one.
    far = dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, learning_rate=1e300),
        checkpoint=CheckpointConfig(every=1),
    )
    reports = with_fault(2, far, run_dir, Fault(rank=0, step=STEPS))
    for report in reports.values():
        assert isinstance(report.error, NotFiniteError), report
        assert report.error.asked == "train: step 2"
    rows = rows_of(run_dir)
    assert [(row["step"], row["generation"]) for row in rows] == [(1, 0)]
    assert last_step(run_dir) == 1


def test_a_run_that_is_started_again_at_its_end_adds_no_row(run_dir):
    base = config(ParallelConfig())
    evaluated = dataclasses.replace(base, train=dataclasses.replace(base.train, eval_every=STEPS))
    bits, rows = [], []
    for _ in range(2):
        with ResilientRanks(1) as processes, without_pictures():
            asked = validate_resilient(evaluated, 1)
            run = ResilientRun(processes.place(0), asked, run_dir, io.StringIO())
            bits.append(run.go().bits_per_byte)
        rows.append((run_dir / "metrics.jsonl").read_text())
    assert bits[0] == bits[1] is not None
    assert rows[0] == rows[1]
    assert rows[0].count('"bits_per_byte"') == 1


def test_a_request_to_one_rank_saves_and_stops_all(run_dir):
    """Ranks without a part in the checkpoint wait for those that gather it."""
    fault = Fault(rank=1, step=2, number=signal.SIGINT)
    reports = with_fault(2, config(ParallelConfig(dp=2)), run_dir, fault)
    assert [report.result for report in reports.values()] == [Outcome(3, None, True)] * 2
    assert last_step(run_dir) == 3


def test_a_disk_that_is_full_for_metrics_is_told_after_a_checkpoint(run_dir):
    asked = validate_resilient(config(ParallelConfig()), 1)
    opened = Path.open

    def to_full(path: Path, *arguments: Any, **options: Any) -> Any:
        # Writing does not begin before the file was made and is opened to append.
        is_full = path.name == "metrics.jsonl" and arguments == ("ab",)
        return opened(Path("/dev/full") if is_full else path, *arguments, **options)

    with ResilientRanks(1) as processes:
        run = ResilientRun(processes.place(0), asked, run_dir, io.StringIO())
        message = r"metrics\.jsonl: No space left on device"
        with patch.object(Path, "open", to_full), pytest.raises(PcommError, match=message):
            run.go()
    assert last_step(run_dir) == 2


@pytest.mark.parametrize(
    ("parallel", "key"),
    [
        (ParallelConfig(dp=1, tp=2, failed=("dp=0,tp=0",)), "parallel.failed"),
        (ParallelConfig(dp=1, cp=2, cp_strategy="heads"), "parallel.cp_strategy"),
    ],
)
def test_what_could_not_go_on_is_refused(parallel, key):
    with pytest.raises(UnsupportedError, match=key):
        validate_resilient(config(parallel), 2)


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (["--store", "h:1"], {}, "--store or --rank without --resilient"),
        (["--resilient", "--ranks", "2", "--rank", "1"], {}, "--rank without an address"),
        (["--resilient", "--store", "h:1", "--restart"], {}, "--restart with a store"),
        (["--resilient", "--store", "h:1", "--trace", "t.json"], {}, "--trace"),
        (["--resilient", "--ranks", "2"], {"WORLD_SIZE": "2"}, "torchrun, and no store"),
        (["--resilient"], {}, "--ranks 1"),
        (["--resilient", "--store", "nowhere", "--rank", "0", "--ranks", "2"], {}, "no HOST:PORT"),
        (["--resilient", "--store", "h:1"], {}, r"none of RANK \(torchrun\)"),
        (["--resilient", "--store", "h:1"], {"JOB_COMPLETION_INDEX": "1"}, "no number of ranks"),
        (
            ["--resilient", "--store", "h:1", "--ranks", "4"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "contradict each other",
        ),
        (["--resilient"], {"PCOMM_STORE": "h:1", "RANK": "0"}, "no number of ranks"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options, variables, message, tmp_path, monkeypatch
):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PCOMM_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        command.run(parser.parse_args(["--out", str(tmp_path / "run"), *options]))
    assert not (tmp_path / "run").exists()
