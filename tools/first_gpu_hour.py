"""What to run first where there is a GPU: does it work, and where does the time go.

    python tools/first_gpu_hour.py --out DIR [--group A|B|C] [--from STAGE] [--fast]

Stages are independent: each command is a process of its own with a limit, and none stops the next.
Three calls of at most ten minutes: group A is stages 0 to 3 (is it right), B is 4 and 5, C is 6 to
8 (how fast). In DIR lie `lines.jsonl`, a line for each command, `log.txt` with what they printed,
`predictions.md`, what was predicted without a GPU beside what was measured, and `summary.txt`. The
last two are printed at the end; a later call with the same DIR adds to all.

The packages are installed as wheels for the time of the call: new ones, or where `hatchling` is not
there those in `.wheels`, which were built before and brought along:

    pip wheel --no-deps --no-build-isolation -w .wheels ./packages/* ./integration

Without a GPU it runs to its end, and says of each command what it would have run. Needs nothing
but Python to begin with. `hardware_status.py` makes a page of the lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_predictions

__all__ = ["STAGES", "STAGE_OF", "Command", "Stage", "main"]

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {"A": (0, 3), "B": (4, 5), "C": (6, 8)}
MOST_SUMMARY = 12_000
# A lent machine ends a call after ten minutes: a little is kept for the summary.
CALL_S = 570.0
_PRINTED_LINES = 14


@dataclass(frozen=True)
class Command:
    """A process of a stage.

    Args:
        name: Name in the lines.
        words: Program and arguments; "python" is the interpreter that runs this.
        limit_s: Seconds after which it is ended, with all that it has started.
        needs_gpu: False if it is run where there is none.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    needs_gpu: bool = True


@dataclass(frozen=True)
class Stage:
    """Commands that answer one question.

    Args:
        number: Number of the stage, from 0, as `--from` takes it.
        question: The question that its lines answer, in words.
        commands: Commands that run one after another, each in a process of its own.
    """

    number: int
    question: str
    commands: tuple[Command, ...]


def _pcomm(name: str, words: str, limit_s: float, *, needs_gpu: bool = True) -> Command:
    start = "from pcomm.core.cli import main; raise SystemExit(main())"
    return Command(name, ("python", "-c", start, *words.split()), limit_s, needs_gpu)


def _pytest(name: str, words: str, limit_s: float) -> Command:
    # Warnings of CUDA and NCCL are no failures.
    options = ["-c", "TEMP/pytest.ini", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    options += ["--import-mode=importlib", "-W", "default", "-q", "-rs", "--tb=short"]
    return Command(name, ("python", "-m", "pytest", *options, *words.split()), limit_s)


def _measured(name: str, limit_s: float) -> Command:
    return Command(name, ("python", "tools/gpu_measurements.py", name), limit_s)


_VERSIONS = (
    "import sys, torch, json, pcomm.core; from importlib.metadata import version as v; "
    "from importlib.util import find_spec as f; "
    "print(json.dumps({'python': sys.version.split()[0], 'torch': torch.__version__, "
    "'cuda': torch.version.cuda, 'triton': v('triton') if f('triton') else None, "
    "**{name: bool(f(name)) for name in ('fla', 'transformers', 'pytest', 'hypothesis')}, "
    "'pcomm': pcomm.core.__version__, 'devices': torch.cuda.device_count(), "
    "'names': [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]}))"
)
_MULTICAST = (
    "from nvls_bench.on_one_gpu import multicast_of_one_device as m; "
    "print('multicast address of one device, or the reason:', m())"
)
# 1B: 16 blocks of 2048, with the vocabulary that the data give.
_SIZES = (
    "--set model.layers=16 --set model.width=2048 --set model.heads=16 --set train.dtype=auto "
    "--set train.sequence_length=2048 --set train.global_batch_tokens=16384 "
    "--set train.micro_batch_tokens=8192 --set train.steps=20 --set train.eval_every=none "
    "--set checkpoint.every=end --set sample.max_tokens=8"
)
_LAUNCHER = "packages/pcomm-nvls/tests/gpu/test_launcher.py"
_PROCESSES = "packages/pcomm-nvls/tests/gpu/test_two_processes.py"
_NCCL = "packages/pcomm-core/tests/gpu/test_nccl_one_rank.py"
_ABANDON = "packages/pcomm-core/tests/gpu/test_abandon_on_nccl.py"
_SESSION = "packages/pcomm-ntp/tests/gpu/test_session_on_nccl.py"
_RACES = "packages/pcomm-nvls/tests/gpu/test_virtual_ranks.py"
_OTHERS = ("core", "fsdp", "nvls", "gdn-cp", "inference")
_SANITIZER = ("compute-sanitizer", "--tool", "racecheck", "python", "-m", "pytest", "-q", _RACES)

STAGES = (
    Stage(
        0,
        "is anything here at all",
        (
            Command("versions", ("python", "-c", _VERSIONS), 60, False),
            _pcomm("doctor", "doctor --json", 60, needs_gpu=False),
            Command("nvidia-smi", ("nvidia-smi",), 20),
            Command("multicast", ("python", "-c", _MULTICAST), 60),
        ),
    ),
    Stage(
        1,
        "are launches, and each multimem instruction, right on one device",
        (_pytest("launcher", f"-m gpu {_LAUNCHER}", 240),),
    ),
    Stage(
        2,
        "which of the tests for a GPU pass",
        (
            *(
                _pytest(
                    f"tests of {name}",
                    f"-m gpu packages/pcomm-{name}/tests "
                    f"--deselect {_LAUNCHER} --deselect {_PROCESSES} --deselect {_NCCL} "
                    f"--deselect {_ABANDON}",
                    120,
                )
                for name in _OTHERS
            ),
            _pytest("tests of integration", "-m gpu integration/tests", 60),
        ),
    ),
    Stage(
        3,
        "do ranks in two processes agree, does NCCL end, are there races",
        (
            _pytest("two processes", f"-m gpu {_PROCESSES}", 90),
            _pytest("one rank on NCCL", f"-m gpu {_NCCL}", 90),
            _pytest("aborts on NCCL", f"-m gpu {_ABANDON}", 60),
            # Without a second GPU no rank dies in it.
            _pytest("a session on NCCL", f"-m gpu {_SESSION}", 90),
            Command("racecheck", (*_SANITIZER, "-k", "captured"), 60),
        ),
    ),
    Stage(
        4,
        "what a launch, a barrier and a copy cost",
        (
            _pcomm("nvls host", "bench nvls --parts host --rounds 21", 90),
            _pcomm("nvls one GPU", "bench nvls --parts one-gpu", 90),
            _measured("copies", 60),
        ),
    ),
    Stage(
        5,
        "what packing and the recurrent layers cost, and is it as predicted",
        (
            Command("packs", ("python", "packages/pcomm-gdn-cp/benchmarks/pack_bandwidth.py"), 120),
            _measured("layers", 150),
            _measured("kernels", 180),
            _measured("counts", 120),
        ),
    ),
    Stage(
        6,
        "what a step of decoding and a prompt cost, and where the time goes",
        (
            _measured("decode", 200),
            _measured("prefill", 100),
            _measured("transformers", 90),
            _measured("unchanged", 90),
        ),
    ),
    Stage(
        7,
        "what a training step of 1B costs: time, share of the peak, memory",
        (
            _pcomm("train GPT", f"train --out TEMP/gpt {_SIZES}", 110),
            _pcomm(
                "train hybrid", f"train --out TEMP/hybrid --set model.pattern=GGGA {_SIZES}", 90
            ),
        ),
    ),
    Stage(8, "does it go on so for a while", (_measured("soak", 60),)),
)

STAGE_OF = {command.name: stage.number for stage in STAGES for command in stage.commands}


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run the stages; 0 if it came to its end, whatever they said."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the four files")
    parser.add_argument("--group", choices=GROUPS, help="stages of one call; default: all")
    parser.add_argument("--from", type=int, default=0, dest="first", help="begin with this stage")
    parser.add_argument("--fast", action="store_true", help="tiny shapes in the measurements")
    parser.add_argument("--within", type=float, default=CALL_S, help="seconds for each group")
    parser.add_argument("--installed", action="store_true", help="use the packages as they are")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    low, high = GROUPS[chosen.group] if chosen.group else (0, 8)
    low = max(low, chosen.first)
    with tempfile.TemporaryDirectory(prefix="first-gpu-hour-") as folder:
        hour = _Hour(chosen.out, Path(folder), is_fast=chosen.fast)
        if not chosen.installed:
            hour.install()
        has_gpu = hour.has_gpu()
        for group_low, group_high in GROUPS.values():
            end = time.monotonic() + chosen.within
            for stage in stages:
                if not max(low, group_low) <= stage.number <= min(high, group_high):
                    continue
                for command in stage.commands:
                    hour.carry_out(stage, command, has_gpu=has_gpu, end=end)
    lines = chosen.out / "lines.jsonl"
    beside, short = gpu_predictions.report(lines, STAGE_OF)
    (chosen.out / "predictions.md").write_text(beside)
    text = summary(lines, stages, short)
    (chosen.out / "summary.txt").write_text(text)
    print(beside, text, sep="\n")
    return 0


class _Hour:
    """Commands that are carried out one after another, and what is kept of them."""

    def __init__(self, out: Path, temporary: Path, *, is_fast: bool) -> None:
        self._lines, self._log = out / "lines.jsonl", out / "log.txt"
        self._temporary, self._is_fast = temporary, is_fast
        # Benchmarks and the support of tests are no part of the wheels.
        beside = [f for kind in ("tests", "benchmarks") for f in ROOT.glob(f"packages/*/{kind}")]
        self._beside = os.pathsep.join(map(str, beside))
        paths = filter(None, (os.environ.get("PYTHONPATH"), self._beside))
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # The repository's own settings ask for plugins that a machine may not have.
        marks = "markers =\n  gpu: needs a CUDA device\n  soak: takes minutes\n"
        (temporary / "pytest.ini").write_text(f"[pytest]\n{marks}")

    def install(self) -> None:
        """Install wheels into a folder that goes away; without success the sources are used."""
        wheels, site = self._temporary / "wheels", self._temporary / "site"
        pip = ("python", "-m", "pip", "--disable-pip-version-check")
        projects = (*sorted(map(str, ROOT.glob("packages/*"))), str(ROOT / "integration"))
        options = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels))
        if self._note(0, Command("wheels", (*pip, *options, *projects), 180))["status"] != "ok":
            wheels = ROOT / ".wheels"
        found = tuple(sorted(map(str, wheels.glob("*.whl"))))
        options = ("install", "-q", "--no-index", "--no-deps", "--target", str(site))
        self._note(0, Command("install", (*pip, *options, *found), 90))
        if site.exists():
            self._environment["PYTHONPATH"] = os.pathsep.join((str(site), self._beside))

    def has_gpu(self) -> bool:
        """Whether torch sees a CUDA device."""
        code = "import torch; raise SystemExit(not torch.cuda.is_available())"
        command = Command("is there a GPU", ("python", "-c", code), 120)
        return bool(self._note(0, command)["status"] == "ok")

    def carry_out(self, stage: Stage, command: Command, *, has_gpu: bool, end: float) -> None:
        """Run a command, or say why it was not run; its line is written in any case."""
        left_s = end - time.monotonic()
        if command.needs_gpu and not has_gpu:
            self._write(stage.number, command, status="needs a GPU", words=" ".join(command.words))
        elif left_s <= 1:
            self._write(stage.number, command, status="no time was left in this group")
        else:
            self._note(stage.number, command, most_s=left_s)

    def _note(
        self, stage: int, command: Command, *, most_s: float = float("inf")
    ) -> dict[str, Any]:
        limit_s, begin = min(command.limit_s, most_s), time.monotonic()
        words = [word.replace("TEMP", str(self._temporary)) for word in command.words]
        words = [sys.executable if word == "python" else word for word in words]
        if self._is_fast and "tools/gpu_measurements.py" in words:
            words.append("--fast")
        with self._log.open("a") as log:
            print(f"\n===== {stage}: {command.name}: {' '.join(words)}", file=log, flush=True)
            start = log.tell()
            status = self._run(words, log, limit_s)
        with self._log.open(errors="replace") as log:
            log.seek(start)
            printed = log.read()
        seconds = round(time.monotonic() - begin, 1)
        return self._write(stage, command, status=status, seconds=seconds, **_told(printed))

    def _run(self, words: list[str], log: Any, limit_s: float) -> str:
        try:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            return f"could not be started: {error}"
        try:
            code = process.wait(limit_s)
            return "ok" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            return f"ended after its limit of {limit_s:.0f} s"
        finally:
            # Its session is its own, and holds all that it has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _write(self, stage: int, command: Command, **facts: Any) -> dict[str, Any]:
        date = datetime.date.today().isoformat()
        line = {"stage": stage, "name": command.name, "date": date, **facts}
        with self._lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{stage} {command.name}: {facts['status']}", flush=True)
        return line


def _told(printed: str) -> dict[str, Any]:
    """The rows of JSON that a command has printed, and its last lines."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    rows = []
    for line in lines:
        if line.startswith("{") and line.endswith("}"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return {"rows": rows[-60:], "last": [line[:240] for line in lines[-_PRINTED_LINES:]]}


def summary(lines: Path, stages: Sequence[Stage] = STAGES, beside: Sequence[str] = ()) -> str:
    """What the lines say, in fewer than 12,000 characters: the newest line of each command.

    Args:
        lines: File of the lines.
        stages: Stages with their questions.
        beside: Lines on predictions, which come last.
    """
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    for text in lines.read_text().splitlines():
        line = json.loads(text)
        newest[line["stage"], line["name"]] = line
    questions = {stage.number: stage.question for stage in stages}
    # What is told of each is cut until all of it fits.
    for most_lines in range(_PRINTED_LINES, -1, -1):
        parts = []
        for number in sorted({stage for stage, _ in newest}):
            parts.append(f"\nstage {number}: {questions.get(number, '')}")
            of_stage = (line for (stage, _), line in newest.items() if stage == number)
            parts += [text for line in of_stage for text in _summed_up(line, most_lines)]
        text = "\n".join([*parts, "\npredictions:", *beside] if beside else parts)
        if len(text) < MOST_SUMMARY:
            return text
    return text[: MOST_SUMMARY - 1]


def _summed_up(line: dict[str, Any], most_lines: int) -> list[str]:
    seconds = f", {line['seconds']} s" if "seconds" in line else ""
    head = f"  {line['name']}: {line['status']}{seconds}"
    if "words" in line:
        return [head, *([f"    {line['words'][:160]}"] if most_lines else [])]
    rows = [
        ", ".join(f"{key} {value}" for key, value in row.items() if key != "device")
        for row in line.get("rows", ())
    ]
    told = [re.sub(r"\s+", " ", text) for text in rows or line.get("last", ())]
    # Rows from the beginning; of other output the end says most.
    shown = told[: 2 * most_lines] if rows else told[len(told) - most_lines :]
    return [head, *(f"    {text[:160]}" for text in shown)]


if __name__ == "__main__":
    raise SystemExit(main())
