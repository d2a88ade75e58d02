"""Ctrl-C and SIGTERM: a checkpoint, exit code 130, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pcomm.integration.checkpoint.folders import checkpoints

PATIENCE_S = 60.0
# Far more steps than are done before the signal, and no checkpoint before it.
ENDLESS = ["train.steps=1000000", "checkpoint.every=0", "train.eval_every=0"]


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
    printed, logged = process.communicate(timeout=PATIENCE_S)
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


def wait_for_steps(out: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}:\n{process.communicate()}")
        assert time.monotonic() < end, "no steps were done"
        time.sleep(0.02)


def steps(out: Path) -> list[int]:
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in parsed if "loss" in row]
