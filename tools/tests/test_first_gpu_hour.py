"""The first hour on a GPU: it ends whatever its commands do, and fits into a message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import first_gpu_hour
import gpu_measurements
from first_gpu_hour import ROOT, STAGES, Command, Stage, main

NOISE = "print('{\"case\": \"a row\"}'); print('x' * 500 + '\\n' * 2, *range(9000), sep='\\n')"
HANGS = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3000)']); "
    "print('child', child.pid, flush=True); time.sleep(3000)"
)


def command(name: str, code: str, limit_s: float = 100.0, *, needs_gpu: bool = False) -> Command:
    return Command(name, ("python", "-c", code), limit_s, needs_gpu)


BAD = (
    Stage(0, "is it here", (command("fails", "raise SystemExit(3)"),)),
    Stage(2, "does it end", (command("hangs", HANGS, 4.0), command("noise", NOISE))),
    Stage(3, "is it there", (Command("missing", ("no-such-program",), 9.0, False),)),
    Stage(4, "what else", (command("gpu", "print('run')", needs_gpu=True),)),
    Stage(8, "last", (command("noise 0", NOISE), command("noise 1", NOISE), command("ok", ""))),
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where there is one: its commands take minutes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # For tiny shapes, several threads only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (out / "lines.jsonl").read_text().splitlines())
    return {line["name"]: line for line in lines}


def test_no_command_stops_the_next_one_and_limits_end_those_that_hang(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--installed"], BAD) == 0
    lines = lines_of(tmp_path)
    states = {name: line["status"] for name, line in lines.items()}
    assert states.pop("missing").startswith("could not be started")
    assert states == {
        "is there a GPU": "ended with 1",
        "fails": "ended with 3",
        "hangs": "ended after its limit of 4 s",
        "noise": "ok",
        "gpu": "needs a GPU",
        "noise 0": "ok",
        "noise 1": "ok",
        "ok": "ok",
    }
    # What it had started is gone, too.
    (told,) = lines["hangs"]["last"]
    child = Path("/proc", told.split()[1], "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    assert lines["noise"]["rows"] == [{"case": "a row"}]
    assert lines["gpu"]["words"] == "python -c print('run')"
    assert len(list(tmp_path.iterdir())) == 4
    text = (tmp_path / "summary.txt").read_text()
    beside = (tmp_path / "predictions.md").read_text()
    printed = capsys.readouterr().out
    assert printed.endswith(f"{beside}\n{text}\n")
    assert "0 of " in text.splitlines()[-1]
    for stage in BAD:
        assert stage.question in text


def test_a_summary_is_cut_where_much_was_said(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu_hour._Hour, "has_gpu", lambda hour: False)
    many = Stage(0, "much", tuple(command(f"noise {number}", NOISE) for number in range(3)))
    assert main(["--out", str(tmp_path), "--installed"], (many,)) == 0
    (line,) = [line for line in lines_of(tmp_path).values() if line["name"] == "noise 0"]
    # As many commands as there are, each of which says as much as can be kept.
    rows = [{"case": "y" * 300, "number": number} for number in range(60)]
    with (tmp_path / "lines.jsonl").open("a") as file:
        for number in range(20):
            told = {**line, "name": f"one {number}", "rows": rows}
            print(json.dumps(told), file=file)
    text = first_gpu_hour.summary(tmp_path / "lines.jsonl", (many,))
    assert 5_000 < len(text) < 12_000
    assert all(f"one {number}: ok" in text for number in range(20))


def test_a_later_call_goes_on_and_its_lines_count(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu_hour._Hour, "has_gpu", lambda hour: False)

    def stages(code: str) -> tuple[Stage, ...]:
        return tuple(Stage(n, "", (command(f"of {n}", code),)) for n in range(9))

    def numbers() -> list[int]:
        found = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
        return [line["stage"] for line in found if line["name"].startswith("of")]

    options = ["--out", str(tmp_path), "--installed"]
    main([*options, "--group", "B"], stages("print('first')"))
    assert numbers() == [4, 5]
    main([*options, "--from", "8"], stages("print('second')"))
    assert numbers() == [4, 5, 8]
    main([*options, "--group", "B", "--from", "5"], stages("print('second')"))
    assert numbers() == [4, 5, 8, 5]
    assert {
        name: line.get("last") for name, line in lines_of(tmp_path).items() if "of" in name
    } == {"of 4": ["first"], "of 5": ["second"], "of 8": ["second"]}
    # No time left in a group: said for each of its commands.
    main([*options, "--group", "A", "--within", "0"], stages(""))
    assert lines_of(tmp_path)["of 0"]["status"] == "no time was left in this group"


@pytest.mark.parametrize("options", [["--installed"], pytest.param([], marks=pytest.mark.soak)])
def test_without_a_gpu_it_says_what_it_would_run(options, tmp_path, monkeypatch):
    """Without options it makes wheels of its own, as where it is carried to a machine."""
    if options:
        # The test above and the long form of this one ask torch, in a process of its own.
        monkeypatch.setattr(first_gpu_hour._Hour, "has_gpu", lambda hour: False)
    assert main(["--out", str(tmp_path), *options]) == 0
    lines = lines_of(tmp_path)
    every = [one for stage in STAGES for one in stage.commands]
    assert len({one.name for one in every}) == len(every)
    assert {one.name for one in every} <= set(lines)
    for one in every:
        assert lines[one.name]["status"] == ("needs a GPU" if one.needs_gpu else "ok"), one.name
    assert options or lines["install"]["status"] == "ok"
    (versions,) = lines["versions"]["rows"]
    assert versions["torch"] == torch.__version__
    assert versions["devices"] == 0
    for one in every:
        for word in one.words:
            assert not re.match(r"(tools|packages|integration)/", word) or (ROOT / word).exists()
    assert len((tmp_path / "summary.txt").read_text()) < 12_000
    beside = (tmp_path / "predictions.md").read_text()
    assert beside.count("`kernels` of stage 5: needs a GPU") > 70
    assert beside.count("`counts` of stage 5: needs a GPU") == 7 + 3 + 1


def test_the_sizes_that_it_trains_are_those_of_a_configuration():
    from pcomm.integration.config.toml import load_config

    (words,) = [one.words for stage in STAGES for one in stage.commands if one.name == "train GPT"]
    values = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    config = load_config(overrides=values)
    weights = 12 * config.model.layers * config.model.width**2
    assert 0.7e9 < weights < 1.3e9
    # A GPU has bf16, and the start of the run says so.
    assert config.train.dtype == "auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured there, and not with tiny shapes")
@pytest.mark.parametrize("name", ["layers", "decode", "prefill", "unchanged", "soak"])
def test_measurements_are_carried_out_with_tiny_shapes(name):
    rows = list(gpu_measurements.MEASUREMENTS[name](True))
    assert len({row["case"] for row in rows}) == len(rows) >= 1
    assert not [row for row in rows if "error" in row]
    assert not [row for row in rows if not row.get("as generate writes", True)]
    assert [row for row in rows if row.get("ms", row.get("both ms", row.get("rounds", 0))) > 0]


def test_the_copy_that_is_measured_has_as_many_loads_in_flight_as_it_says():
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from gpu_copy_kernel import copy_kernel
    from nvls_support.compiled import compile_kernel

    x = torch.zeros(64, dtype=torch.uint8)
    arguments = {"x": x, "out": x, "num_vectors": 1 << 16, "BLOCK": 512 * 4}
    made = compile_kernel(copy_kernel, arguments, 90, num_warps=16)
    found = re.findall(r"\b(LDG|STG)\.E\.128", made.machine_code())
    assert found == 4 * ["LDG"] + 4 * ["STG"]
