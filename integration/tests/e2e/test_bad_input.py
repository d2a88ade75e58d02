"""What a user gets wrong: the four parts of an error, exit code 2, no traceback, nothing hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pcomm.core.testing.programs import PATIENCE_S, scaled_s

DYING = Path(__file__).with_name("dying_train.py")

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, code: int) -> str:
    """The message on stderr: the four parts, perhaps after a line on where a run computes."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert "Traceback" not in captured.err
    said = captured.err.splitlines()
    if " on the CPU, " in said[0]:
        del said[0]
    first, *rest = said
    assert "Error: " in first
    assert len(rest) >= 2
    return captured.err


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "Did you mean 'steps'"),
        ("trian.steps=3", "Did you mean 'train'"),
        ("train.steps=soon", "train.steps: the value 'soon'"),
        ("train.steps=0", "train.steps: the value 0"),
        ("model.heads=3", "model.heads is 3, model.kv_heads is 2"),
        ("train.global_batch_tokens=100", "100 is no multiple of 32"),
        ("parallel.tp=3", "tp 3, cp 1 for "),
        ("parallel.dp=5", "dp 5, tp 1, cp 1 for "),
        ("parallel.cp=3", "cp 3 for "),
        ("model.pattern=X", "G Gated DeltaNet"),
        ("data.vocabulary=2147483647", "should be less than or equal to 1048576"),
    ],
)
def test_configurations_that_cannot_run(train, tmp_path, capsys, ranks, override, message):
    out = tmp_path / "run"
    assert message in refused(capsys, train(out, "--ranks", ranks, "--set", override))
    assert not out.exists()


def test_a_batch_that_is_larger_than_all_memory(train, tmp_path, capsys):
    out, size = tmp_path / "run", 2**40
    words = [f"train.sequence_length={size}", f"train.global_batch_tokens={size}"]
    code = train(out, *(word for item in words for word in ("--set", item)))
    said = refused(capsys, code)
    assert f"train.sequence_length: {size} tokens; {size} at once take at least" in said
    assert "Set train.sequence_length far below" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 3 --set parallel.tp=2", "dp auto, tp 2, cp 1 for 3 ranks"),
        (
            "--ranks 2 --set parallel.tp=2 --set model.mlp_width=65",
            "model.mlp_width is 65, parallel.tp is 2",
        ),
        ("--ranks=0", "pcomm train --ranks 0: a number below 1"),
        ("--ranks=-2", "pcomm train --ranks -2: a number below 1"),
        ("--resilient", "train --resilient: --ranks 1\nWhen the only rank dies"),
        ("--config absent.toml", "configuration file absent.toml: No such file"),
        ("--dry-run --cluster absent.toml", "--cluster: configuration file absent.toml: No such"),
        ("--log-file absent/log.txt", "--log-file absent/log.txt: no folder absent"),
        ("--log-file .", "--log-file .: a folder"),
    ],
)
def test_words_that_do_not_fit_together(train, tmp_path, capsys, words, message):
    assert message in refused(capsys, train(tmp_path / "run", *words.split()))
    assert not (tmp_path / "run").exists()


def test_ranks_inside_a_launcher(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, train(tmp_path / "run", "--ranks", "2"))
    assert "--ranks 2: WORLD_SIZE=2" in message


# In the gate core starts ranks by torchrun, and its reader is told errors of two ranks.
@pytest.mark.soak
def test_torchrun_shows_the_error_once_and_last(start, config_file, tmp_path):
    """Its own traceback comes before; the other rank only says that it ends with the first."""
    script = Path(sysconfig.get_path("scripts"), "pcomm")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script]
    words = ["train", "--config", config_file, "--out", tmp_path / "run"]
    absent = ["--set", f"data.path={tmp_path}/absent.txt"]
    process = start("python", *launcher, *words, *absent)
    _, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    assert process.returncode == 1
    head, _, cause = logged.rpartition("Root Cause")
    assert "ConfigError: " in cause
    assert "absent.txt" in cause
    # Its own, or of the signal by which torchrun ends it where the other rank was faster.
    assert re.search(r"exitcode  : (2|-15)\b", cause)
    fix = cause.splitlines()[-2].strip()
    assert len(fix) > 20
    assert fix not in head


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "blank.txt").write_text(" \n")
    (folder / "one.txt").write_text("1")
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "no-text.txt").write_bytes(b"\xff\xfa\x00\x01")
    return folder


DATA = {
    "absent.txt": "no such file",
    "absent-*.txt": "absent-*.txt",
    "blank.txt": "no text in any of them",
    "one.txt": "one document, '1'",
    "broken.jsonl": "broken.jsonl",
    "no-text.txt": "no-text.txt",
}


# Starting ranks takes a second, and on two of them it is the same check.
@pytest.mark.parametrize(("name", "ranks"), [*((n, "1") for n in DATA), ("blank.txt", "2")])
def test_text_that_cannot_be_learnt(train, sources, tmp_path, capsys, name, ranks):
    out = tmp_path / "run"
    code = train(out, "--ranks", ranks, "--set", f"data.path=['{sources / name}']")
    message = refused(capsys, code)
    assert DATA[name] in message
    # Once, and not once for each rank.
    assert message.count("ConfigError: ") == 1
    assert [path.name for path in out.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_folder_that_cannot_be_made(train, tmp_path, capsys, ranks):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "run"
    message = refused(capsys, train(out, "--ranks", ranks))
    assert f"train: folder {out}: " in message
    assert "Choose a folder that can be written, with --out." in message


def test_a_failed_start_can_be_repeated(train, sources, tmp_path, capsys):
    """What a failed start leaves does not stand in the way of the next."""
    out = tmp_path / "run"
    refused(capsys, train(out, "--set", f"data.path=['{sources / 'blank.txt'}']"))
    assert train(out) == 0


def test_a_rank_that_dies_is_named_and_stops_the_others(start, config_file, tmp_path):
    """At start-up, before it has joined the others; or while they wait for it in a collective."""
    options = ["--config", config_file, "--out", tmp_path / "run", "--ranks", 2]
    process = start("python", DYING, "-", "train", *options)
    printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    assert printed.splitlines() == ["import 1", "batch 1"]
    assert logged.count("rank 1 of 2 died: killed by SIGKILL") == 2


def test_a_mistake_is_reported_without_waiting_for_torch(config_file, tmp_path):
    for file, setting, message, late in (
        (config_file, "train.stesp=1", "Did you mean 'steps'", "torch"),
        # And what is no file without waiting for the configuration.
        ("absent.toml", "train.steps=1", "configuration file absent.toml", "pydantic"),
    ):
        code = (
            "import sys\n"
            "from pcomm.core.cli import main\n"
            f"code = main(['train', '--config', {str(file)!r}, '--out', {str(tmp_path)!r},"
            f" '--set', {setting!r}])\n"
            f"sys.exit(3 if {late!r} in sys.modules else code)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
        )
        assert (run.returncode, run.stdout) == (2, ""), run.stderr
        assert message in run.stderr
