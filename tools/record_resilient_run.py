"""Record a training run that loses two ranks and gets one back, for the documentation.

    python tools/record_resilient_run.py

It trains `integration/configs/resilient.toml` twice on eight ranks of this machine, the second time
killing two of them with SIGKILL, and lets one of those come back by the command that the launcher
prints. It writes the recording, its picture, and what the page says of both; `--page` writes the
last two again from the recording, without training.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from pcomm.integration.config.toml import load_config
from pcomm.integration.metrics.rows import read_rows
from recorded_run import KILLED, UNDISTURBED, Event, lines_of, load, save, shapes, summary
from recorded_run_picture import draw
from repository import ROOT

# Benchmarks are no part of the wheels.
sys.path.append(str(ROOT / "packages" / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row

CONFIG = ROOT / "integration" / "configs" / "resilient.toml"
RECORDING = ROOT / "docs" / "benchmarks" / "ntp_recorded_run.csv"
PAGE = ROOT / "docs" / "how-to" / "survive-failed-gpus.md"

RANKS = 8
# Two ranks of different replicas. The first one comes back.
FIRST, SECOND = 2, 5
# Shares of the steps. A process that comes back first loads torch, which takes seconds, and so it
# trains from about two thirds on.
FIRST_DIES, SECOND_DIES, FIRST_COMES_BACK = 1 / 4, 1 / 3, 1 / 2
DEGREES = ["4/4", "3/4", "3/3", "4/3"]
# Ranks that compute all the time leave a process that comes back a small part of two cores, which
# on hosts with cores of its own it would have: they run at a lower priority.
NICE = 10

_PLACE = re.compile(
    r"(<!-- recorded run -->\n\n).*?(\n<!-- end of the recorded run -->)", re.DOTALL
)
_JOIN = re.compile(r"a rank R that has died comes back by the same command with: (--store .+)")
_POLL_S = 0.02


def processes(log: str) -> dict[int, int]:
    """Process ids by rank, as the log of `pcomm train --resilient` tells them."""
    found = re.findall(r"rank (\d+) of \d+ is process (\d+)", log)
    return {int(rank): int(process) for rank, process in found}


def join_command(log: str, rank: int) -> list[str]:
    """The words to add to the command by which a rank comes back, as the log tells them."""
    told = _JOIN.search(log)
    if told is None:
        raise ValueError(f"no command to join in the log:\n{log}")
    words = shlex.split(told[1])
    return [str(rank) if word == "R" else word for word in words]


def filled(page: str, text: str) -> str:
    """A page with `text` between its two comments."""
    return _PLACE.sub(lambda match: match[1] + text + match[2], page)


def record(folder: Path) -> tuple[list[Event], list[dict[str, float | None]]]:
    """Events and metrics of a run whose ranks are killed; `folder` may hold its tokens."""
    steps = load_config(CONFIG).train.steps
    metrics, log, events = folder / "metrics.jsonl", folder.with_suffix(".log"), list[Event]()

    def told() -> str:
        return log.read_text()

    def newest_step() -> int:
        rows = read_rows(metrics) if metrics.exists() else []
        return max((int(row["step"] or 0) for row in rows), default=0)

    def kill(rank: int) -> None:
        os.kill(processes(told())[rank], signal.SIGKILL)
        events.append(Event(time.time(), f"rank {rank} killed"))

    with log.open("w") as file:
        job = _start(folder, file)
        back: subprocess.Popen[str] | None = None
        try:
            # An earlier run's metrics are removed before any rank begins.
            _wait(job, told, lambda: len(processes(told())) == RANKS)
            _wait(job, told, lambda: newest_step() >= steps * FIRST_DIES)
            kill(FIRST)
            _wait(job, told, lambda: newest_step() >= steps * SECOND_DIES)
            kill(SECOND)
            _wait(job, told, lambda: newest_step() >= steps * FIRST_COMES_BACK)
            events.append(Event(time.time(), f"rank {FIRST} started again"))
            again = [*_words(folder), *join_command(told(), FIRST)]
            back = subprocess.Popen(_here(again), cwd=ROOT, stderr=file, text=True)
            codes = job.wait(), back.wait()
        finally:
            for process in (job, back):
                if process is not None and process.poll() is None:
                    process.kill()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{told()}")
    return events, read_rows(metrics)


def undisturbed(folder: Path) -> list[dict[str, float | None]]:
    """Metrics of the same run when nobody dies."""
    with folder.with_suffix(".log").open("w") as file:
        code = _start(folder, file).wait()
    if code:
        raise RuntimeError(f"exit code {code}:\n{folder.with_suffix('.log').read_text()}")
    return read_rows(folder / "metrics.jsonl")


def _start(folder: Path, log: TextIO) -> "subprocess.Popen[str]":
    # What is removed is an earlier run; its tokens stay.
    command = ["nice", "-n", str(NICE), *_here([*_words(folder), "--restart"])]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, text=True)


def _words(folder: Path) -> list[str]:
    config = str(CONFIG.relative_to(ROOT))
    words = ["pcomm", "train", "--resilient", "--config", config, "--ranks", str(RANKS)]
    return [*words, "--out", str(folder)]


def _here(command: list[str]) -> list[str]:
    """A command with the `pcomm` that stands beside this Python."""
    return [str(Path(sys.executable).with_name("pcomm")), *command[1:]]


def _wait(job: "subprocess.Popen[str]", told: Callable[[], str], is_so: Callable[[], bool]) -> None:
    while not is_so():
        if job.poll() is not None:
            raise RuntimeError(f"the run ended before its time:\n{told()}")
        time.sleep(_POLL_S)


def _origin() -> dict[str, object]:
    """The columns of every benchmark row that say where it comes from."""
    row = asdict(Row("", "", 0.0, "", "", None, 0))
    names = ("hardware", "cores", "python", "torch", "commit", "date", "command")
    return {name: row[name] for name in names}


def main() -> None:
    """Record, or write the page again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="write picture and page alone")
    if not parser.parse_args().page:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "run")
            alone = undisturbed(folder)
            events, metrics = record(folder)
        lines = [*lines_of(UNDISTURBED, alone), *lines_of(KILLED, metrics, events)]
        found = [line.degrees for line in shapes(lines)]
        if found != DEGREES:
            raise RuntimeError(f"degrees {found}, not {DEGREES}: the machine was too busy")
        save(RECORDING, lines, _origin())
    lines, origin = load(RECORDING)
    draw(lines, RECORDING.with_suffix(".png"))
    text = summary(lines, origin)
    PAGE.write_text(filled(PAGE.read_text(), text))
    print(text)


if __name__ == "__main__":
    main()
