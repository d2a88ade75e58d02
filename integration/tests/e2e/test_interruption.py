"""Ctrl-C and SIGTERM: a checkpoint, exit code 130, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from pcomm.core.testing.patience import PATIENCE_S, scaled_s, wait_until
from pcomm.core.testing.programs import Programs
from pcomm.integration.checkpoint.folders import checkpoints

# Far more steps than are done before the signal, and no checkpoint before it.
ENDLESS = ["train.steps=1000000", "checkpoint.every=end", "train.eval_every=end"]


def interrupt_parent(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def interrupt_group(process: subprocess.Popen[str]) -> None:
    """As a terminal does it: every process gets the signal, and the ranks once more by theirs."""
    os.killpg(process.pid, signal.SIGINT)


def terminate_parent(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)


WAYS = {
    "SIGINT to one process": (1, interrupt_parent),
    "SIGTERM to one process": (1, terminate_parent),
    "SIGINT to the parent of two ranks": (2, interrupt_parent),
    "SIGINT to the whole group": (2, interrupt_group),
    "SIGTERM to the parent of two ranks": (2, terminate_parent),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_saves_and_goes_on(
    way: str,
    start: Callable[..., subprocess.Popen[str]],
    train: Callable[..., int],
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks, send = WAYS[way]
    out = tmp_path / "run"
    overrides = [word for item in ENDLESS for word in ("--set", item)]
    process = start(
        "pcomm", "train", "--config", config_file, "--out", out, "--ranks", ranks, *overrides
    )
    wait_for_steps(out, process)
    send(process)
    printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    assert process.returncode == 130, logged
    assert "Traceback" not in logged

    [saved] = checkpoints(out)
    assert saved.step == steps(out)[-1]
    assert steps(out) == list(range(1, saved.step + 1))
    message = f"stopped after step {saved.step}; the same command goes on from there"
    assert printed.splitlines() == [message]

    # The same command, but for an end that can be waited for; on one process, to save time.
    more = ["train.steps=" + str(saved.step + 2), *ENDLESS[1:]]
    assert train(out, *(word for item in more for word in ("--set", item))) == 0
    assert f"after step {saved.step}" in capsys.readouterr().err
    assert steps(out) == list(range(1, saved.step + 3))


def test_a_killed_launcher_leaves_no_rank(
    start: Callable[..., subprocess.Popen[str]],
    started: Programs,
    config_file: Path,
    tmp_path: Path,
) -> None:
    """`kill -9`, of which no process can tell its children."""
    out = tmp_path / "run"
    overrides = [word for item in ENDLESS for word in ("--set", item)]
    words = ["--config", config_file, "--out", out, "--ranks", 2, *overrides]
    process = start("pcomm", "train", *words)
    wait_for_steps(out, process)
    # The command, what its multiprocessing starts, and two ranks.
    assert len(started.running()) >= 4
    process.kill()
    wait_until(lambda: not started.running(), "the end of what was started")


def test_what_a_test_leaves_running_ends_with_it(config_file: Path, tmp_path: Path) -> None:
    """Workers of torchrun are in sessions of their own, and hold the pipes of the launcher."""
    out = tmp_path / "run"
    overrides = [word for item in ENDLESS for word in ("--set", item)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    script = Path(sysconfig.get_path("scripts"), "pcomm")
    command = [*launcher, script, "train", "--config", config_file, "--out", out, *overrides]
    with Programs() as programs:
        process = programs.start(sys.executable, *command)
        wait_for_steps(out, process)
        assert len(programs.running()) >= 3
        # As a time limit of the test does; the workers do not hear of it.
        process.kill()
        programs.stop()
        assert programs.running() == []


def wait_for_steps(out: Path, process: subprocess.Popen[str]) -> None:
    metrics = out / "metrics.jsonl"

    def has_done_some() -> bool:
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}:\n{process.communicate()}")
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= 3

    wait_until(has_done_some, "three steps")


def steps(out: Path) -> list[int]:
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in parsed if "loss" in row]
