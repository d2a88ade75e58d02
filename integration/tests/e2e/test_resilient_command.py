"""`pcomm train --resilient` and `--join`, as users type them: a rank is killed and comes back."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until
from pcomm.integration.checkpoint.folders import newest

# Far more steps than are done before the signal, and no checkpoint before it.
ENDLESS = ["train.steps=1000000", "checkpoint.every=end", "train.eval_every=none"]
ON_FOUR = ["parallel.dp=2", "parallel.tp=2", "train.schedule=constant"]


def test_a_killed_replica_is_missed_until_a_rank_comes_back_and_all_stop_together(
    start, config_file, tmp_path
):
    out, log = tmp_path / "run", tmp_path / "log"
    overrides = [word for item in (*ENDLESS, *ON_FOUR) for word in ("--set", item)]
    words = ["--config", config_file, "--out", out, "--ranks", 4, *overrides]
    with log.open("w") as stderr:
        launcher = start("pcomm", "train", "--resilient", *words, stderr=stderr)
    wait_for_row(out, launcher, ranks=4)
    processes = re.findall(r"rank (\d) of 4 is process (\d+)", log.read_text())
    # All of a replica, with the one that writes the metrics.
    for rank in "01":
        os.kill(int(dict(processes)[rank]), signal.SIGKILL)
    wait_for_row(out, launcher, ranks=2)

    told = re.search(r"comes back by: pcomm (.*)", log.read_text())
    assert told is not None, log.read_text()
    back = start("pcomm", *shlex.split(told[1].replace("--rank R", "--rank 0")))
    wait_for_row(out, launcher, ranks=3, after=2)

    launcher.send_signal(signal.SIGINT)
    for process in (launcher, back):
        process.communicate(timeout=scaled_s(PATIENCE_S))
    # Of the launcher: the store ends with it, perhaps before the other has read that all are done.
    assert launcher.returncode == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    found = rows(out)
    last = newest(out)
    assert last is not None
    assert [row["step"] for row in found] == list(range(1, last.step + 1))
    counts = [row["ranks"] for row in found]
    # The two may have died in different steps.
    assert [count for count, _ in itertools.groupby(counts)] in ([4, 2, 3], [4, 3, 2, 3])


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows that are whole."""
    file = out / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_row(
    out: Path, launcher: subprocess.Popen[str], *, ranks: int, after: int | None = None
) -> None:
    """Wait until as many ranks train, where `after` is given after a time with so many."""

    def is_there() -> bool:
        if launcher.poll() is not None:
            pytest.fail(f"ended with {launcher.returncode}:\n{launcher.communicate()}")
        found = [row["ranks"] for row in rows(out)]
        return ranks in found[found.index(after) if after else 0 :]

    wait_until(is_there, f"a step of {ranks} ranks")
