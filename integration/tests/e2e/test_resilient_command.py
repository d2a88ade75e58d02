"""`pcomm train --resilient` as users and launchers start it: ranks, and the store, are killed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from integration_support.forked_commands import ForkedCommand
from integration_support.short_runs import whole_rows
from pcomm.core.testing.programs import PATIENCE_S, free_port, scaled_s, wait_until
from pcomm.integration.checkpoint.folders import newest

PCOMM = Path(sysconfig.get_path("scripts"), "pcomm")
# Far more steps than are done before the signal, and no checkpoint before it.
ENDLESS = ["train.steps=1000000", "checkpoint.every=end", "train.eval_every=none"]
ON_FOUR = ["parallel.dp=2", "parallel.tp=2", "train.schedule=constant"]


def test_a_killed_replica_is_missed_until_a_rank_comes_back_and_all_stop_together(
    fork, config_file, tmp_path
):
    out, log = tmp_path / "run", tmp_path / "log"
    overrides = [word for item in (*ENDLESS, *ON_FOUR) for word in ("--set", item)]
    words = ["--config", config_file, "--out", out, "--ranks", 4, *overrides]
    with log.open("w") as stderr:
        launcher = fork("train", "--resilient", *words, stderr=stderr)
    wait_for_row(out, launcher, ranks=4)
    processes = re.findall(r"rank (\d) of 4 is process (\d+)", log.read_text())
    # All of a replica, with the one that writes the metrics.
    for rank in "01":
        os.kill(int(dict(processes)[rank]), signal.SIGKILL)
    wait_for_row(out, launcher, ranks=2)

    told = re.search(r"comes back by the same command with: (.*)", log.read_text())
    assert told is not None, log.read_text()
    again = shlex.split(told[1].replace("--rank R", "--rank 0"))
    with (tmp_path / "back").open("w") as stderr:
        back = fork("train", "--resilient", *words, *again, stderr=stderr)
    wait_for_row(out, launcher, ranks=3, after=2)

    launcher.send_signal(signal.SIGINT)
    for process in (launcher, back):
        process.communicate(timeout=scaled_s(PATIENCE_S))
    # Of the launcher: the store ends with it, perhaps before the other has read that all are done.
    assert launcher.returncode == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    found = whole_rows(out)
    last = newest(out)
    assert last is not None
    assert [row["step"] for row in found] == list(range(1, last.step + 1))
    counts = [row["ranks"] for row in found]
    # The two may have died in different steps.
    assert [count for count, _ in itertools.groupby(counts)] in ([4, 2, 3], [4, 3, 2, 3])


@pytest.mark.soak
def test_ranks_of_a_launcher_come_back_by_themselves_and_outlive_their_store(
    start, config_file, tmp_path
):
    """Each process is started again as Slurm and Kubernetes do; the store dies and comes back."""
    out, port = tmp_path / "run", free_port()
    keys = [*ENDLESS, "checkpoint.every=20", "parallel.dp=2", "train.schedule=constant"]
    overrides = [word for item in keys for word in ("--set", item)]
    words = ["train", "--resilient", "--config", config_file, "--out", out, *overrides]

    def rank(number: int) -> subprocess.Popen[str]:
        own = {
            "SLURM_PROCID": str(number),
            "SLURM_NTASKS": "2",
            "PCOMM_STORE": f"localhost:{port}",
            "OMP_NUM_THREADS": "1",
        }
        with (tmp_path / f"log{number}").open("a") as log:
            options = {"stderr": log, "stdout": log}
            return start("env", *[f"{k}={v}" for k, v in own.items()], PCOMM, *words, **options)

    def logs() -> str:
        return "\n".join((tmp_path / f"log{n}").read_text() for n in range(2))

    # They are there before the store is.
    ranks = [rank(0), rank(1)]
    store = start("pcomm", "store", "--port", port)
    wait_for_row(out, ranks[0], ranks=2)
    ranks[1].kill()
    ranks[1].wait()
    wait_for_row(out, ranks[0], ranks=1)
    ranks[1] = rank(1)
    wait_for_row(out, ranks[0], ranks=2, after=1)
    wait_until(lambda: newest(out) is not None, "a checkpoint")
    # The store dies; the same ranks at a new one of its address go on, here to an end.
    store.kill()
    for process in ranks:
        process.communicate(timeout=scaled_s(PATIENCE_S))
    assert [process.returncode for process in ranks] == [75, 75], logs()
    last = newest(out)
    assert last is not None
    words += ["--set", f"train.steps={last.step + 30}"]
    store = start("pcomm", "store", "--port", port)
    ranks = [rank(0), rank(1)]
    for process in ranks:
        process.communicate(timeout=scaled_s(PATIENCE_S))
    assert [process.returncode for process in ranks] == [0, 0], logs()
    assert [row["step"] for row in whole_rows(out)] == list(range(1, last.step + 31))
    # A process that its launcher starts once more finds that the run is done.
    late = rank(1)
    # And another job at the store is refused.
    told = [f"PCOMM_STORE=localhost:{port}", "RANK=0", "WORLD_SIZE=2", "OMP_NUM_THREADS=1"]
    other = start("env", *told, PCOMM, *words, "--set", "train.seed=5")
    late.communicate(timeout=scaled_s(PATIENCE_S))
    _, refused = other.communicate(timeout=scaled_s(PATIENCE_S))
    assert (late.returncode, other.returncode) == (0, 2)
    assert "the run was done before" in logs()
    assert "that of another job: train.seed is 5 here and 0 there" in refused
    store.terminate()
    store.communicate(timeout=scaled_s(PATIENCE_S))
    assert store.returncode == 0


def wait_for_row(
    out: Path,
    launcher: subprocess.Popen[str] | ForkedCommand,
    *,
    ranks: int,
    after: int | None = None,
) -> None:
    """Wait until as many ranks train, where `after` is given after a time with so many."""

    def is_there() -> bool:
        if launcher.poll() is not None:
            pytest.fail(f"ended with {launcher.returncode}:\n{launcher.communicate()}")
        found = [row["ranks"] for row in whole_rows(out)]
        return ranks in found[found.index(after) if after else 0 :]

    wait_until(is_there, f"a step of {ranks} ranks")
