"""The actor that hosts a rank, without Ray: its process dies and comes back, stops, or fails."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from integration_support.short_runs import tiny_config
from pcomm.core.errors import ConfigError
from pcomm.core.process import RankPlace, RankReport, logs, open_store
from pcomm.core.testing.programs import PATIENCE_S, is_running, scaled_s, wait_until
from pcomm.integration.commands.train_on_ray import RankActor
from pcomm.integration.config.sections import CheckpointConfig, Config, ParallelConfig


@pytest.fixture
def endless(run_dir: Path) -> Config:
    config = tiny_config(ParallelConfig(), steps=1_000_000, eval_every="none")
    return replace(config, checkpoint=CheckpointConfig(every="end"))


@pytest.mark.soak
def test_its_process_is_started_again_until_it_is_asked_to_stop(endless, tmp_path):
    server = open_store("127.0.0.1", 0)
    place, out = RankPlace(0, 1, "127.0.0.1", server.port), tmp_path / "run"
    actor, log, reports = RankActor(os.getcwd(), {}), tmp_path / "log", list[RankReport]()
    output = logs.LogOutput(file=log)
    running = threading.Thread(
        target=lambda: reports.append(actor.run(place, endless, out, output)), daemon=True
    )
    running.start()

    def steps() -> int:
        file = out / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    wait_until(steps, "a step")
    (first,) = processes(log)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(processes(log)) == 2 and steps() > 1, "another process")
    assert "killed by SIGKILL; it is started again" in log.read_text()
    actor.stop()
    # Ctrl-C reaches the driver once, and ranks at every look.
    actor.stop()
    running.join(scaled_s(PATIENCE_S))
    (report,) = reports
    assert report.has_finished
    assert report.result.is_interrupted
    assert not any(map(is_running, processes(log)))
    # One that Ray starts again after that does not begin.
    again = RankActor(os.getcwd(), {})
    again.stop()
    assert not again.run(place, endless, out, output).has_finished
    assert len(processes(log)) == 2


def test_an_error_that_says_what_to_do_is_final(endless, tmp_path):
    server = open_store("127.0.0.1", 0)
    refused = replace(endless, data=replace(endless.data, path=("/nowhere",)))
    place = RankPlace(0, 1, "127.0.0.1", server.port)
    report = RankActor(os.getcwd(), {}).run(place, refused, tmp_path / "run", None)
    assert isinstance(report.error, ConfigError)


def processes(log: Path) -> list[int]:
    """All processes that the rank has had."""
    return [int(pid) for pid in re.findall(r"is process (\d+)", log.read_text())]
