"""Ctrl-C and SIGTERM: a checkpoint, exit code 130, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from integration_support.short_runs import settings
from pcomm.core.testing.programs import PATIENCE_S, Programs, is_running, scaled_s, wait_until
from pcomm.integration.checkpoint.folders import checkpoints

# Far more steps than are done before the signal, and no checkpoint before it.
ENDLESS = ["train.steps=1000000", "checkpoint.every=end", "train.eval_every=end"]


WAYS = {
    # As a terminal does it: every process gets the signal, and the ranks once more by theirs.
    "SIGINT to the whole group": lambda process: os.killpg(process.pid, signal.SIGINT),
    "SIGTERM to the parent": lambda process: process.send_signal(signal.SIGTERM),
    "SIGINT to the parent": lambda process: process.send_signal(signal.SIGINT),
}


# Ranks are told below by the other signal, too.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_one_process_saves_and_goes_on(number, train, tmp_path, capsys):
    out = tmp_path / "run"

    def send() -> None:
        wait_until(lambda: has_steps(out), "three steps")
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code = train(out, *settings({}, *ENDLESS))
    sender.join()
    printed = capsys.readouterr()
    assert_saved(out, code, printed.out, printed.err)
    assert_goes_on(out, train, capsys)


# Runs one after another, so that their ranks come from one server.
RUNS = """
import sys
from pcomm.core.cli import main
for out in sys.argv[1].split(","):
    print(main(["train", "--out", out, *sys.argv[2:]]), flush=True)
"""


def test_two_ranks_save_and_go_on(start, train, config_file, tmp_path, capsys):
    runs = [tmp_path / way.replace(" ", "-") for way in WAYS]
    words = ["--config", config_file, "--ranks", 2, *settings({}, *ENDLESS)]
    process = start("python", "-c", RUNS, ",".join(map(str, runs)), *words)
    for out, send in zip(runs, WAYS.values(), strict=True):

        def has_done_some(out: Path = out) -> bool:
            if process.poll() is not None:
                pytest.fail(f"ended with {process.returncode}:\n{process.communicate()}")
            return has_steps(out)

        wait_until(has_done_some, "three steps")
        send(process)
    printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    lines = printed.splitlines()
    assert len(lines) == 2 * len(runs)
    for out, message, code in zip(runs, lines[::2], lines[1::2], strict=True):
        assert_saved(out, int(code), message, logged)
    # On one process, to save time.
    assert_goes_on(runs[0], train, capsys)


def assert_saved(out: Path, code: int, printed: str, logged: str) -> None:
    assert code == 130, logged
    assert "Traceback" not in logged
    [saved] = checkpoints(out)
    assert saved.step == steps(out)[-1]
    assert steps(out) == list(range(1, saved.step + 1))
    message = f"stopped after step {saved.step}; the same command goes on from there"
    assert printed.splitlines() == [message]


def assert_goes_on(
    out: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same command, but for an end that can be waited for."""
    [saved] = checkpoints(out)
    more = settings({"train.steps": str(saved.step + 2)}, *ENDLESS[1:])
    assert train(out, *more) == 0
    assert f"after step {saved.step}" in capsys.readouterr().err
    assert steps(out) == list(range(1, saved.step + 3))


# Workers in sessions of their own, which hold the pipes of their launcher, as those of torchrun.
LAUNCHER = """
import subprocess
import time
for _ in range(2):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
time.sleep(600)
"""


def test_what_a_test_leaves_running_ends_with_it():
    with Programs() as programs:
        process = programs.start(sys.executable, "-S", "-c", LAUNCHER)

        def workers() -> int:
            names = [Path(f"/proc/{pid}/comm") for pid in programs.running()]
            return sum(name.exists() and name.read_text() == "sleep\n" for name in names)

        wait_until(lambda: workers() == 2, "two workers")
        # As a time limit of the test does; the workers do not hear of it.
        process.kill()
        programs.stop()
        assert programs.running() == []


PARENT = """
import os
import time
from integration_support.forked_commands import ForkedCommand
if __name__ == "__main__":
    # Not into pipes of this process, which would end it, too.
    with open(os.devnull, "w") as nowhere:
        words = {"env": os.environ, "stdout": nowhere, "stderr": nowhere}
        print(ForkedCommand("store", "--port", 0, **words).pid, flush=True)
    time.sleep(600)
"""


def test_a_forked_command_is_like_a_fresh_one_and_ends_with_its_parent(fork, start, tmp_path):
    words = ["train", "--out", tmp_path / "run", "--set", "train.stesp=1"]
    fresh, forked = (command(*words) for command in (partial(start, "pcomm"), fork))
    assert forked.communicate(scaled_s(PATIENCE_S)) == fresh.communicate()
    assert forked.returncode == fresh.returncode == 2
    script, told = tmp_path / "parent.py", tmp_path / "told"
    script.write_text(PARENT)
    with told.open("w") as stdout:
        parent = fork(script, stdout=stdout)
    wait_until(lambda: told.read_text().endswith("\n"), "the command of a command")
    pid = int(told.read_text())
    assert is_running(pid)
    parent.kill()
    assert parent.wait(scaled_s(PATIENCE_S)) == -signal.SIGKILL
    wait_until(lambda: not is_running(pid), "the end of what it had started")


def has_steps(out: Path) -> bool:
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= 3


def steps(out: Path) -> list[int]:
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in parsed if "loss" in row]
