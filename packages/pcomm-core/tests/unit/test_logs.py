"""Logging: silent until a command asks, rank 0 speaks, the root logger stays as it was."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pcomm.core.errors import ConfigError, PeerError
from pcomm.core.process import logs

CONFIG, PEER = (
    kind("asked", found="found", why="why", fix="fix") for kind in (ConfigError, PeerError)
)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("pcomm")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_rank_0_writes_levels_from_the_one_asked_and_others_warnings_only() -> None:
    root, logger = logging.getLogger(), logging.getLogger("pcomm.core.groups.open_groups")
    theirs, before = logging.NullHandler(), (list(root.handlers), root.level)
    logging.getLogger("pcomm").addHandler(theirs)
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", 0, stream=first)
    logger.debug("quiet")
    logger.info("opened %d", 3)
    assert without_time(first.getvalue()) == "INFO pcomm.core.groups.open_groups: opened 3\n"
    # A second call replaces the first.
    logs.configure("debug", 5, stream=second)
    logger.info("the same on every rank")
    logger.warning("only here")
    said = "WARNING rank 5 pcomm.core.groups.open_groups: only here\n"
    assert without_time(second.getvalue()) == said
    assert "only here" not in first.getvalue()
    # What the program had stays, and so does the root logger.
    assert theirs in logging.getLogger("pcomm").handlers
    assert (list(root.handlers), root.level) == before


def test_without_a_stream_it_follows_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", 0)
    logging.getLogger("pcomm").info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert without_time(captured.err) == "INFO pcomm: hello\n"


def without_time(line: str) -> str:
    """A line without its time, which must be now, with an offset from UTC."""
    time, _, rest = line.partition(" ")
    said, now = datetime.fromisoformat(time), datetime.now().astimezone()
    assert said.utcoffset() == now.utcoffset()
    assert abs((now - said).total_seconds()) < 600
    return rest


def test_a_rank_is_named_where_there_are_several() -> None:
    for rank, size, place in ((0, 1, ""), (0, 2, "rank 0 "), (1, 2, "rank 1 ")):
        stream = io.StringIO()
        logs.configure("info", rank, size=size, stream=stream)
        logging.getLogger("pcomm.x").warning("hello")
        assert without_time(stream.getvalue()) == f"WARNING {place}pcomm.x: hello\n"


def test_an_object_a_line_holds_what_a_text_line_says_and_the_traceback() -> None:
    stream = io.StringIO()
    logs.configure("info", 0, stream=stream, output=logs.LogOutput(is_json=True))
    logging.getLogger("pcomm.x").info("two\nlines, %s", "\u00e9")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("pcomm.x").exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    without_time(f"{first.pop('time')} ")
    assert first == {
        "level": "info", "rank": 0, "logger": "pcomm.x", "message": "two\nlines, \u00e9",
    }  # fmt: skip
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: why")


def test_a_file_gets_each_message_once_its_folder_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    stream = io.StringIO()
    logs.configure("info", 0, stream=stream, output=logs.LogOutput(file=path))
    logging.getLogger("pcomm").info("early")
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_text("from the start before\n")
    logging.getLogger("pcomm").info("late")
    logs.tell_error(CONFIG)
    before, *own = path.read_text().splitlines(keepends=True)
    assert before == "from the start before\n"
    assert "".join(own[:2]) == stream.getvalue()
    assert without_time("".join(own[2:])) == "ERROR pcomm: ConfigError: asked: found\nwhy\nfix\n"
    # Another rank has a file of its own, as soon as it has something to say.
    logs.configure("info", 3, stream=stream, output=logs.LogOutput(file=path))
    logging.getLogger("pcomm").info("the same")
    assert [one.name for one in path.parent.iterdir()] == ["log.txt"]
    logging.getLogger("pcomm").warning("only here")
    said = (path.parent / "log.rank3.txt").read_text()
    assert without_time(said) == "WARNING rank 3 pcomm: only here\n"


def test_progress_goes_to_a_terminal_and_else_into_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", 0)
    logs.progress_stream().write("step 1/9\n")
    assert without_time(capsys.readouterr().err) == "INFO pcomm.progress: step 1/9\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert logs.progress_stream() is sys.stderr
    assert logs.progress_stream(logs.LogOutput(is_json=True)) is not sys.stderr


def test_the_error_that_ends_a_command_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", 0)
    logs.tell_error(CONFIG)
    assert capsys.readouterr().err == "ConfigError: asked: found\nwhy\nfix\n"
    logs.configure("info", 0, output=logs.LogOutput(is_json=True))
    logs.tell_error(CONFIG)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "ConfigError: asked: found\nwhy\nfix"


def test_torchrun_is_told_and_shows_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is torchrun's own reader of these files, and the text that it prints.

    The rank that failed is slow: it says so half a minute after the one that waited for it.
    """
    failures = {}
    for rank, (error, now) in enumerate(((PEER, 1000.0), (CONFIG, 1030.0))):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        logs.configure("info", rank, size=2)
        logs.tell_error(error)
        failures[rank] = ProcessFailure(rank, 1000 + rank, 2, str(file))
    assert capsys.readouterr().err == ""
    shown = ChildFailedError("pcomm", failures)
    assert shown.get_first_failure()[0] == 1
    assert str(shown).count("ConfigError: asked: found") == 1
    assert "ConfigError: asked: found" in str(shown).rpartition("Root Cause")[2]
    # Where its folder is gone, stderr is told.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    logs.tell_error(CONFIG)
    assert capsys.readouterr().err.startswith("ConfigError: asked: found")


def test_an_error_is_seen_though_torchrun_starts_the_process_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torchrun reports the error of the last attempt alone."""
    logs.configure("info", 0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for count, is_last in (("0", False), ("1", False), ("2", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        logs.tell_error(CONFIG)
        said = capsys.readouterr().err
        assert said == ("" if is_last else "ConfigError: asked: found\nwhy\nfix\n")


def test_importing_every_module_configures_nothing() -> None:
    # In a process of its own, because pytest has attached handlers to this one. Modules are
    # imported for the first time there, and torch before them: what torch does is its own.
    program = """
import importlib, logging, pkgutil, torch, torch.distributed
root = logging.getLogger()
before = list(root.handlers), root.level
import pcomm.core
names = [m.name for m in pkgutil.walk_packages(pcomm.core.__path__, "pcomm.core.")]
for name in names:
    if not name.startswith("pcomm.core.testing"):
        importlib.import_module(name)
assert "pcomm.core.cli" in names and "pcomm.core.doctor.checks" in names, names
assert (list(root.handlers), root.level) == before, root.handlers
ours = logging.getLogger("pcomm")
assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True), ours.handlers
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ""
