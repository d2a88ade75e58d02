"""A run's folder: held by one run, and left as it was by those that are refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from integration_support.faulty_runs import hold_until_killed
from integration_support.short_runs import prepare_words, run_words
from pcomm.core import PcommError, connect
from pcomm.core.errors import ConfigError, PeerError
from pcomm.core.process.launch import fork_server, start_rank, starting
from pcomm.core.testing import ranks
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.data import tokenizer
from pcomm.integration.train import run as run_module
from pcomm.integration.train.interrupt import Interrupt, RankBarrier, Stopped
from pcomm.integration.train.run import Outcome
from pcomm.integration.train.run_folder import lock_run

Files = dict[str, tuple[bytes, int]]


def contents(run_dir: Path) -> Files:
    """Every file with its content and the time of its last change."""
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(run_dir)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in files
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("text")) / "text" / "*.txt"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another corpus."""
    file = tmp_path / "other.jsonl"
    file.write_text("".join(f'{{"text": "line {n} of others"}}\n' for n in range(50)))
    return file


def test_another_text_is_refused_before_the_folder_changes(text, other, tmp_path):
    run = tmp_path / "run"
    run_words(text, run)
    before = contents(run)
    with pytest.raises(ConfigError, match=r"the text of data.path.* was '\w+' and is '\w+'"):
        run_words(other, run, "train.steps=6")
    assert contents(run) == before
    assert run_words(text, run, "train.steps=5").steps == 5


def test_a_folder_that_is_a_hugging_face_directory_is_left_alone(text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json of a Hugging Face directory"):
        run_words(text, tmp_path)
    # The lock stays, as that of any run.
    assert {path.name for path in tmp_path.iterdir()} <= {"config.json", "run.lock"}


@pytest.mark.parametrize("path", ["absent.txt", "blank.txt"])
def test_a_restart_with_a_text_that_is_none_keeps_the_results(text, tmp_path, path):
    run = tmp_path / "run"
    run_words(text, run)
    (tmp_path / "blank.txt").write_text(" ")
    before = contents(run)
    with pytest.raises(ConfigError):
        run_words(tmp_path / path, run, must_restart=True)
    assert contents(run) == before


def test_a_restart_takes_another_text(text, other, tmp_path):
    run = tmp_path / "run"
    run_words(text, run)
    assert run_words(other, run, must_restart=True).steps == 4
    left = {file.name for file in run.iterdir() if file.is_dir()}
    assert left - {"tensorboard"} == {"checkpoints", "data"}


@pytest.mark.parametrize("left", [None, '{"pid": 1, "host": "another"}'], ids=["new", "left"])
@ranks(2)
def test_a_folder_that_hosts_do_not_share_is_an_error_on_each(rank, text, tmp_path, left):
    """Also where another run has left its lock in the folder of that name."""
    run = tmp_path / f"host {rank}" / "run"
    if left is not None and rank == 1:
        run.mkdir(parents=True)
        (run / ".lock").write_text(left)
    with pytest.raises(PcommError, match=r"rank 1 on .* does not see there what rank 0") as caught:
        run_words(text, run)
    assert type(caught.value) is (ConfigError if rank else PeerError)
    assert not (run / "data").exists()
    if rank:
        assert "--out a folder on a file system that all hosts share" in str(caught.value)


# -- the lock --------------------------------------------------------------------------------


def test_a_second_run_in_one_folder_is_told_of_the_first(text, tmp_path):
    run = tmp_path / "run"
    run_words(text, run)
    before = contents(run)
    with starting(imports_main=False):
        holder, theirs = start_rank(fork_server(()), "holder", hold_until_killed, run, duplex=True)
    with theirs:
        try:
            assert theirs.recv() == "held"
            expected = rf"folder {run}: a run of process {holder.pid} on host \S+, which is under"
            with pytest.raises(ConfigError, match=expected):
                run_words(text, run, "train.steps=6", must_restart=True)
            left = contents(run)
            left.pop(".lock")
            assert left == before
        finally:
            # It dies without a chance to tidy up.
            holder.kill()
            holder.join()
    assert (run / ".lock").exists()
    assert run_words(text, run, "train.steps=5").steps == 5
    assert not (run / ".lock").exists()


def test_two_runs_in_one_process(tmp_path):
    with (
        lock_run(tmp_path),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on host"),
        lock_run(tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with lock_run(tmp_path), lock_run(tmp_path / "another"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_whose_holder_ends_just_then(tmp_path):
    """The name is gone when the lock is got, so another run may have made it anew."""
    removed = []
    flock = fcntl.flock

    def flock_late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        flock(descriptor, how)

    with patch("fcntl.flock", flock_late), lock_run(tmp_path):
        assert removed
        with pytest.raises(ConfigError, match="under way"), lock_run(tmp_path):
            pass


def test_a_file_system_without_locks_is_said(tmp_path, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with patch("fcntl.flock", no_locks), lock_run(tmp_path):
        assert "no lock for" in caplog.text
    assert list(tmp_path.iterdir()) == []


# -- interrupted while it prepares -----------------------------------------------------------


def test_ctrl_c_is_heard_while_the_tokenizer_is_trained(text, tmp_path, monkeypatch):
    """A library that computes without Python's knowledge, and takes no note of signals."""
    is_over = threading.Event()

    def compute(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert is_over.wait(60)

    monkeypatch.setattr(tokenizer, "_trained", compute)
    run = tmp_path / "run"
    try:
        assert run_words(text, run) == Outcome(0, None, is_interrupted=True)
    finally:
        is_over.set()
    assert not run.exists()
    monkeypatch.undo()
    assert run_words(text, run).steps == 4
    assert newest(run) is not None


@ranks(2)
def test_all_ranks_stop_with_one_that_is_asked_to(rank, text, tmp_path):
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # An interpreter hears of it at its next step.
        for _ in range(1000):
            pass

    with patch.object(tokenizer, "_trained", stop):
        outcome = run_words(text, tmp_path / "run")
    assert outcome == Outcome(0, None, is_interrupted=True)


@ranks(2)
def test_a_request_ends_an_attempt_on_all_ranks_and_hides_no_error(rank):
    def fail() -> None:
        if rank == 0:
            raise ConfigError("key", found="broken", why="", fix="")

    interrupt = Interrupt()
    with connect() as world:
        together = RankBarrier(world, interrupt)
        assert together("attempt", lambda: rank) == rank
        interrupt.is_requested = rank == 1
        with pytest.raises(PeerError if rank else ConfigError, match="key: broken"):
            together("attempt", fail)
        with pytest.raises(Stopped):
            together("attempt", lambda: rank)
        interrupt.is_requested = False
        assert together("attempt", lambda: rank) == rank
        with pytest.raises(PeerError if rank else ConfigError, match="key: broken"):
            together("attempt", fail)


def test_a_run_that_goes_on_tells_the_steps_that_it_has(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_words(text, run, "train.steps=2")
    before = contents(run)
    check = run_module.check_files

    def asked(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        check(*arguments, **options)

    monkeypatch.setattr(run_module, "check_files", asked)
    assert run_words(text, run) == Outcome(2, None, is_interrupted=True)
    assert contents(run) == before


def test_without_evaluation_nothing_is_evaluated(text, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "evaluate", None)
    outcome = run_words(text, tmp_path / "run", "train.eval_every=none")
    assert outcome == Outcome(4, None, is_interrupted=False)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"bits_per_byte"' not in rows
    assert rows.count('"loss"') == 4
    # The same run, from its last checkpoint.
    monkeypatch.undo()
    outcome = run_words(text, tmp_path / "run", "train.eval_every=end")
    assert outcome.bits_per_byte is not None


def test_a_single_text_trains_without_further_settings(tmp_path):
    file = tmp_path / "input.txt"
    file.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}\n" for n in range(300)))
    outcome = run_words(file, tmp_path / "run")
    assert outcome.steps == 4
    assert outcome.bits_per_byte is not None
    assert 0 < outcome.bits_per_byte < 20


# -- a full disk -----------------------------------------------------------------------------

FULL = Path("/dev/full")


def test_a_disk_that_is_full_for_metrics_stops_the_run_with_a_checkpoint(text, tmp_path):
    run = tmp_path / "run"
    opened = Path.open

    def to_full(path: Path, *arguments: object, **options: object) -> object:
        target = FULL if path.name == "metrics.jsonl" else path
        return opened(target, *arguments, **options)

    message = r"metrics\.jsonl: No space left on device"
    with patch.object(Path, "open", to_full), pytest.raises(PcommError, match=message):
        run_words(text, run, "train.steps=9", "checkpoint.every=end")
    saved = newest(run)
    assert saved is not None
    assert saved.step == 2
    assert run_words(text, run, "checkpoint.every=end").steps == 4
