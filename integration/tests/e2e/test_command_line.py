"""`pcomm train`: what it prints and writes, and that it goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pcomm.core.cli import main
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.integration.checkpoint.folders import checkpoints
from pcomm.integration.commands.train import command as train_command
from pcomm.integration.config.toml import load_config
from pcomm.integration.data.tokenizer import load_tokenizer
from pcomm.integration.train import run

KEYS = {"step", "loss", "tokens_per_s", "mean_tokens_per_s", "step_ms", "data_ms", "mfu"}
KEYS |= {"lr", "grad_norm", "memory_mib", "peak_memory_mib"}

Train = Callable[..., int]
Start = Callable[..., subprocess.Popen[str]]


class Run(NamedTuple):
    """A command that has ended well."""

    out: Path
    printed: str
    logged: str


def finish(process: subprocess.Popen[str], out: Path) -> Run:
    printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    assert process.returncode == 0, logged
    # The gloo of torch 2.10 prints there what later ones do not.
    lines = [line for line in printed.splitlines(True) if "connected peer ranks is : " not in line]
    return Run(out, "".join(lines), logged)


@pytest.fixture(scope="module")
def two(start: Start, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two ranks that torchrun started, with the installed command."""
    out = tmp_path_factory.mktemp("two") / "run"
    script = Path(sysconfig.get_path("scripts"), "pcomm")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script]
    words = ["train", "--config", config_file, "--out", out]
    return finish(start("python", *launcher, *words), out)


@pytest.fixture
def copied(two: Run, tmp_path: Path) -> Path:
    """The folder of that run, to be changed."""
    return shutil.copytree(two.out, tmp_path / "run")


def rows(run: Path, key: str) -> dict[int, float]:
    """Step to number, of the rows that have it; no step may come twice."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in parsed if key in row]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_it_writes_what_it_promises(two, config_file):
    assert load_config(two.out / "config.toml") == load_config(config_file)
    assert 257 < load_tokenizer(two.out / "tokenizer.json").num_ids <= 320
    assert [checkpoint.step for checkpoint in checkpoints(two.out)] == [4, 6]
    image = (two.out / "loss.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert image[-8:-4] == b"IEND"
    left_over = [path for path in two.out.rglob("*") if path.suffix in (".tmp", ".partial")]
    assert left_over == []


def test_its_rows_have_the_keys_that_others_build_on(two):
    parsed = [json.loads(line) for line in (two.out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in parsed if "loss" in row]
    assert all(row.keys() >= KEYS for row in steps)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens_per_s"] * row["step_ms"] == pytest.approx(256e3) for row in steps)
    evaluations = [row["step"] for row in parsed if "bits_per_byte" in row]
    assert evaluations == [2, 4, 6]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


def test_it_prints_bits_per_byte_then_a_sample_then_the_paths(two):
    bits = rows(two.out, "bits_per_byte")[6]
    assert two.printed.count("held-out bits per byte: ") == 1
    first, blank, rest = two.printed.split("\n", 2)
    assert first == f"held-out bits per byte: {bits:.3f}"
    assert blank == ""
    assert rest.startswith("word")
    before, _, after = two.printed.partition("next:\n")
    paths = [line.split()[0] for line in before.splitlines()[-5:]]
    files = ("checkpoints", "metrics.jsonl", "loss.png", "samples.jsonl", "config.toml")
    assert paths == [str(two.out / name) for name in files]
    generate, *others = after.splitlines()
    shown = [f"  pcomm {word} {two.out}" for word in ("chat", "serve", "plot")]
    if (two.out / "tensorboard").is_dir():
        shown.append(f"  tensorboard --logdir {two.out}")
    assert others == shown
    _, *words = shlex.split(generate)
    assert words == ["generate", str(two.out), "--prompt", "word"]
    assert main([*words, "--max-tokens", "2"]) == 0
    assert "step 6/6  loss" in two.logged
    assert "Traceback" not in two.logged


@pytest.fixture(scope="module")
def rounding(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run on one process, and how far rounding alone moves its losses."""
    folder = tmp_path_factory.mktemp("one")
    assert train(folder / "whole") == 0
    # The same sums over a batch that is computed in four parts.
    assert train(folder / "parts", "--set", "train.micro_batch_tokens=64") == 0
    pairs = zip(*(rows(folder / n, "loss").values() for n in ("whole", "parts")), strict=True)
    return folder / "whole", max(abs(a - b) for a, b in pairs)


def assert_same_numbers(mine: Path, rounding: tuple[Path, float]) -> None:
    one, moved_by = rounding
    # Another order of the additions moves a loss as far as the other order above did, or a few
    # times that; 1e-6 is a unit in the last place of a loss in fp32, where that was by chance 0.
    allowed = 8 * max(moved_by, 1e-6)
    for key in ("loss", "bits_per_byte"):
        theirs = rows(one, key)
        assert rows(mine, key) == {
            step: pytest.approx(value, abs=allowed, rel=0) for step, value in theirs.items()
        }
    assert allowed < 1e-3


def test_two_ranks_give_the_numbers_of_one_process(two, rounding):
    assert_same_numbers(two.out, rounding)


def test_two_ranks_of_the_command_give_them_too(train, tmp_path, rounding):
    assert train(tmp_path / "run", "--ranks", "2") == 0
    assert_same_numbers(tmp_path / "run", rounding)


def test_a_finished_run_only_evaluates_and_writes(train, two, copied, capsys):
    """On one process, where the run was on two."""
    assert train(copied) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == two.printed.splitlines()[0]
    assert (copied / "metrics.jsonl").read_bytes() == (two.out / "metrics.jsonl").read_bytes()
    assert [checkpoint.step for checkpoint in checkpoints(copied)] == [4, 6]


def test_a_longer_run_goes_on_and_says_so(train, copied, capsys):
    before = rows(copied, "loss")
    assert train(copied, "--set", "train.steps=8") == 0
    assert f"resuming {copied} after step 6" in capsys.readouterr().err
    after = rows(copied, "loss")
    assert list(after) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {step: after[step] for step in before} == before
    assert list(rows(copied, "bits_per_byte")) == [2, 4, 6, 8]
    assert [checkpoint.step for checkpoint in checkpoints(copied)] == [6, 8]


def test_restart_begins_anew(train, copied, capsys):
    before = rows(copied, "loss")
    options = ["--set", "train.seed=3", "--set", "model.layers=1", "--set", "train.steps=3"]
    assert train(copied, "--restart", *options) == 0
    assert "resuming" not in capsys.readouterr().err
    after = rows(copied, "loss")
    assert list(after) == [1, 2, 3]
    assert after[1] != before[1]
    assert [checkpoint.step for checkpoint in checkpoints(copied)] == [2, 3]
    assert load_config(copied / "config.toml").model.layers == 1


def test_a_variant_learns(train, tmp_path):
    """On one process, where the run of two ranks below has as much besides."""
    overrides = ["train.dtype=bf16", "model.tie_embeddings=true", "checkpoint.asynchronous=false"]
    assert train(tmp_path, *(word for item in overrides for word in ("--set", item))) == 0
    losses = rows(tmp_path, "loss")
    assert losses[6] < losses[1] - 0.5


def test_everything_at_once_on_two_ranks(train, tmp_path):
    overrides = [
        "parallel.tp=2",
        "parallel.sequence=true",
        "train.dtype=bf16",
        "model.tie_embeddings=true",
        "model.qk_norm=true",
        "train.micro_batch_tokens=64",
    ]
    words = [word for item in overrides for word in ("--set", item)]
    assert train(tmp_path, "--ranks", "2", *words) == 0
    losses = rows(tmp_path, "loss")
    assert losses[6] < losses[1] - 0.5


def test_without_held_out_text_it_says_so(train, tmp_path, capsys):
    options = ["--set", "data.held_out=0", "--set", "train.steps=2", "--set", "sample.prompt=''"]
    assert train(tmp_path, *options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "no held-out documents, so no bits per byte (data.held_out = 0)"
    assert printed[1].startswith(str(tmp_path / "checkpoints"))
    assert rows(tmp_path, "bits_per_byte") == {}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_without_evaluation_it_says_so(train, tmp_path, capsys):
    words = ["train.steps=1", "train.eval_every=none", "sample.max_tokens=0"]
    assert train(tmp_path / "run", *(word for item in words for word in ("--set", item))) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == 'no bits per byte (train.eval_every = "none")'


def test_it_says_that_it_was_stopped(train, tmp_path, monkeypatch, capsys):
    """While the data are prepared, and before anything can listen for the request."""

    def asked(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run, "prepare_folder", lambda *_, **__: asked())
    assert train(tmp_path / "run") == 130
    printed = capsys.readouterr()
    assert printed.out == "stopped before the first step; the same command begins again\n"
    monkeypatch.setattr("pcomm.integration.commands.train.train_rank", asked)
    assert train(tmp_path / "run") == 130
    assert capsys.readouterr().err.startswith("stopped at once; the same command goes on from")


def test_its_help_names_the_kinds_of_models_and_every_default(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    for kind in ("GPT", "Mamba-2", "Gated DeltaNet", "hybrids", "experts"):
        assert kind in text
    # An option has a line of its own, with what it takes and its default below it.
    options = re.split(r"\n  (?=--)", shown.partition("examples:")[0])[1:]
    assert len(options) == 15
    for option in options:
        assert "default: " in option or "(required" in option or "--debug" in option
    # And the examples are commands that it would take.
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    examples = shown.partition("examples:")[2].replace("\\\n", " ")
    examples = re.findall(r"pcomm train (.*)", examples)
    assert len(examples) == 6
    for example in examples:
        parser.parse_args(shlex.split(example))


def test_messages_are_objects_and_kept_in_the_run(train, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train.steps=2", "train.eval_every=none", "sample.max_tokens=0"]
    sets = [word for item in words for word in ("--set", item)]
    assert train(out, "--log-format", "json", "--log-file", *sets) == 0
    said = capsys.readouterr().err
    assert (out / "log.txt").read_text() == said
    messages = [json.loads(line) for line in said.splitlines()]
    assert {one["rank"] for one in messages} == {0}
    assert any(one["message"].startswith("step 2/2  loss ") for one in messages)
    plan = r"[\d,]+ documents of [\d,]+ tokens, and \d+ held out; 2 steps of .* [\d.]+ epochs\n"
    assert any(re.search(plan, one["message"]) for one in messages)
    # The error of a start goes there, too.
    assert train(out, "--log-file", "--set", "train.steps=1") == 2
    assert "already longer" in (out / "log.txt").read_text()
