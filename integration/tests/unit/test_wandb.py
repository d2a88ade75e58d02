"""Weights & Biases: the calls, what happens without it, and what its own client keeps."""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration_support.short_runs import run_words, write_words
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Config, MetricsConfig
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.metrics.rows import read_rows
from pcomm.integration.metrics.sinks import open_sinks
from pcomm.integration.metrics.trackers import open_wandb


class FakeRun:
    def __init__(self, calls: list[tuple[str, Any]], folder: str) -> None:
        self._calls, self.dir = calls, f"{folder}/wandb/offline-run/files"
        self.url, self.project = None, "words"

    def define_metric(self, *args: Any, **options: Any) -> None:
        self._calls.append(("define_metric", (args, options)))

    def log(self, *args: Any, **options: Any) -> None:
        self._calls.append(("log", (args, options)))
        if args[0]["step"] == 666:
            raise OSError("disk full")

    def finish(self, *args: Any, **options: Any) -> None:
        self._calls.append(("finish", (args, options)))


class FakeWandb:
    """Stands for the module; refuses the modes it is told to."""

    def __init__(self, *refused: str) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._refused = refused

    def Settings(self, **options: Any) -> SimpleNamespace:
        self.calls.append(("Settings", ((), options)))
        return SimpleNamespace(**options)

    def init(self, *args: Any, **options: Any) -> FakeRun:
        self.calls.append(("init", (args, options)))
        if options["mode"] in self._refused:
            raise ConnectionError("refused")
        return FakeRun(self.calls, options["dir"])

    def of(self, name: str) -> list[dict[str, Any]]:
        return [options for called, (_, options) in self.calls if called == name]

    def logged(self) -> list[dict[str, float]]:
        return [args[0] for called, (args, _) in self.calls if called == "log"]


def config_of(mode: str) -> Config:
    metrics = MetricsConfig(wandb=mode, wandb_project="words")  # type: ignore[arg-type]
    return replace(recipes.tiny(), metrics=metrics)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def use(run: Path, mode: str, *rows: dict[str, float], resumed: int | None = None) -> None:
    sink = open_wandb(run, config_of(mode), keep_through=resumed)
    assert sink is not None
    for row in rows:
        sink.write(row)
    sink.close()


def test_a_run_is_sent_in_groups_and_goes_on_under_its_id(tmp_path, fake):
    run = tmp_path / "my-run"
    run.mkdir()
    use(run, "online", {"step": 1, "loss": 2.0, "lr": 0.1}, {"step": 1, "bits_per_byte": 1.5})
    use(run, "online", {"step": 2, "loss": 1.0}, resumed=1)
    use(run, "offline", {"step": 1, "loss": 3.0})
    first, second, third = fake.of("init")
    assert (first["name"], first["project"], first["mode"]) == ("my-run", "words", "online")
    assert first["config"]["train"]["learning_rate"] == recipes.tiny().train.learning_rate
    assert first["dir"] == str(run)
    assert first["id"] == second["id"] != third["id"]
    assert [one["resume"] for one in (first, second, third)] == ["allow", "allow", None]
    assert fake.logged() == [
        {"step": 1, "train/loss": 2.0, "train/lr": 0.1},
        {"step": 1, "eval/bits_per_byte": 1.5},
        {"step": 2, "train/loss": 1.0},
        {"step": 1, "train/loss": 3.0},
    ]
    # Not the client's own step, which never falls: rows after a checkpoint are written again.
    assert all("step" not in options for options in fake.of("log"))
    assert fake.of("define_metric")[:2] == [{}, {"step_metric": "step"}]
    assert fake.of("finish") == [{"exit_code": 0}] * 3
    # An answer that never comes may not hold up the ranks that wait.
    assert all(0 < one["init_timeout"] <= 30 < one["finish_timeout"] for one in fake.of("Settings"))


def test_an_error_that_the_caller_handles_is_not_one_of_the_run(tmp_path, fake):
    try:
        raise LookupError
    except LookupError as outer:
        use(tmp_path, "online", {"step": 1, "loss": 2.0})
        with pytest.raises(ArithmeticError), closing(open_wandb(tmp_path, config_of("online"))):
            raise ArithmeticError from outer
    assert fake.of("finish") == [{"exit_code": 0}, {"exit_code": 1}]


def test_the_calls_are_those_of_the_client(tmp_path, fake):
    """Names and arguments, by the signatures of the real one."""
    use(tmp_path, "online", {"step": 1, "loss": 2.0})
    real = subprocess.run(
        [sys.executable, "-c", _SIGNATURES], capture_output=True, text=True, check=False
    )
    if real.returncode:
        pytest.skip("wandb is not installed")
    known = json.loads(real.stdout)
    for name, (args, options) in fake.calls:
        parameters = known[name]
        assert set(options) <= set(parameters), name
        assert len(args) <= len(parameters)
    assert {name for name, _ in fake.calls} == set(known)


_SIGNATURES = """
import inspect, json, wandb
names = {name: getattr(wandb.Run, name) for name in ("log", "finish", "define_metric")}
known = {name: list(inspect.signature(one).parameters)[1:] for name, one in names.items()}
known["init"] = list(inspect.signature(wandb.init).parameters)
known["Settings"] = list(wandb.Settings.model_fields)
print(json.dumps(known))
"""


def test_a_failure_marks_the_run_and_a_failing_client_does_not_end_it(tmp_path, fake, caplog):
    sinks = open_sinks(
        tmp_path, rank=0, total_steps=9, stream=sys.stderr, config=config_of("online")
    )

    def fails() -> None:
        with closing(sinks):
            for step in (1, 666, 667):
                sinks.write({"step": step, "loss": 1.0})
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert fake.of("finish") == [{"exit_code": 1}]
    assert [row["step"] for row in fake.logged()] == [1, 666]
    assert caplog.text.count("Weights & Biases gets no more rows (OSError: disk full)") == 1
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 666, 667]


def test_a_request_to_stop_leaves_nothing_unsent(tmp_path, fake, monkeypatch):
    """SIGTERM comes while the second row is sent."""
    text, log = write_words(tmp_path / "text"), FakeRun.log

    def stopped(run: FakeRun, numbers: dict[str, float]) -> None:
        log(run, numbers)
        if numbers["step"] == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(FakeRun, "log", stopped)
    options = ("train.steps=9", "train.eval_every=none", "metrics.wandb=online")
    outcome = run_words(text, tmp_path / "run", *options)
    assert outcome.is_interrupted
    kept = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in fake.logged()] == [row["step"] for row in kept] == [1, 2, 3]
    assert fake.calls[-1] == ("finish", ((), {"exit_code": 0}))


@pytest.mark.parametrize(
    ("refused", "modes", "has_sink"),
    [(("online",), ["online", "offline"], True), (("online", "offline"), None, False)],
)
def test_a_server_that_refuses_is_told_and_rows_are_kept(
    tmp_path, monkeypatch, caplog, refused, modes, has_sink
):
    fake = FakeWandb(*refused)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    caplog.set_level(logging.INFO, "pcomm")
    sink = open_wandb(tmp_path, config_of("online"))
    assert (sink is not None) == has_sink
    assert [one["mode"] for one in fake.of("init")] == modes or modes is None
    assert "Weights & Biases, online: ConnectionError: refused" in caplog.text
    said = "wandb sync" if has_sink else "gets no rows; metrics.jsonl has every row"
    assert said in caplog.text


def test_only_the_first_rank_has_one_and_none_is_needed(tmp_path, fake, monkeypatch, caplog):
    for rank, mode in ((1, "online"), (0, "none")):
        sinks = open_sinks(
            tmp_path, rank=rank, total_steps=9, stream=sys.stderr, config=config_of(mode)
        )
        sinks.close()
    assert fake.calls == []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_wandb(tmp_path, config_of("online")) is None
    assert "Run `python3 -m pip install wandb` to have it." in caplog.text


def test_what_does_not_go_together():
    project = "metrics.wandb_project=mine"
    with pytest.raises(ConfigError, match=r"metrics.wandb_project: the value 'mine' with"):
        validate(apply_overrides(recipes.tiny(), [project]), 1)
    online = apply_overrides(recipes.tiny(), [project, "metrics.wandb=online"])
    assert validate(online, 1).metrics.wandb == "online"
    with pytest.raises(UnsupportedError, match=r"--resilient: metrics.wandb: the value 'online'"):
        validate_resilient(online, 2)


def records(file: Path) -> Iterator[bytes]:
    """What a file of the client holds: LevelDB's log format behind 7 bytes, in blocks of 32 KiB."""
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        # Whole, or the last part.
        if kind in (1, 4):
            yield whole
            whole = b""


def test_its_own_client_keeps_what_a_run_and_its_resumption_write(tmp_path):
    """Offline, parsed by the messages of the client itself."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    text, run = write_words(tmp_path / "text"), tmp_path / "run"
    options = ("metrics.wandb=offline", "train.eval_every=2", "checkpoint.every=2")
    run_words(text, run, "train.steps=2", "train.schedule=constant", *options)
    run_words(text, run, "train.steps=4", "train.schedule=constant", *options)
    rows: list[dict[str, Any]] = []
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    run_id = (run / "wandb" / "run-id").read_text()
    assert [file.stem for file in files] == [f"run-{run_id}"] * 2
    for parsed in (Record.FromString(data) for file in files for data in records(file)):
        if items := parsed.history.item:
            pairs = [(item.key or item.nested_key[0], item.value_json) for item in items]
            rows.append({name: json.loads(value) for name, value in pairs})
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4]
    kept = read_rows(run / "metrics.jsonl")
    for tag, name in (("train/loss", "loss"), ("eval/bits_per_byte", "bits_per_byte")):
        sent = [row[tag] for row in rows if tag in row]
        assert sent == [row[name] for row in kept if name in row]
    run_words(text, run, "train.steps=1", "metrics.wandb=none", must_restart=True)
    assert not (run / "wandb").exists()
