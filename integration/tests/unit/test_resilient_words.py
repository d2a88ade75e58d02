"""What a resilient run says when ranks die or come back, what it refuses, and its folder."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from integration_support.short_runs import run_words, write_words
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    FencedError,
    PeerTimeoutError,
    TopologyError,
)
from pcomm.core.face import version_of
from pcomm.core.process import RankPlace, RankReport
from pcomm.core.process.store_server import open_store
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.commands import train_resilient
from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import apply_overrides, load_config
from pcomm.integration.train.resilient import cause
from pcomm.integration.train.run_folder import hold_folder, share_folder
from pcomm.ntp import StateLostError, StoreLostError
from pcomm.ntp.redistribute import Moved
from pcomm.ntp.session import Transition

LENGTHS = ("sequence_length", "global_batch_tokens", "micro_batch_tokens")


def transition(reason: str, ranks: tuple[int, ...], gone: dict[int, str]) -> Transition:
    return Transition(0, reason, ranks, gone, 0, 0, 0, 0, None)


@pytest.mark.parametrize(
    ("reason", "ranks", "gone", "expected"),
    [
        ("Connection reset", (0, 2), {1: "killed by SIGKILL"}, "rank 1: killed by SIGKILL"),
        ("a process joins", (0, 1, 2, 3), {}, "rank 3 joins"),
        ("Connection reset", (0, 1, 2), {1: "failed"}, "rank 1: failed, rank 1 joins"),
        ("a link broke", (0, 1, 2), {}, "a link broke"),
    ],
)
def test_a_generation_is_explained_by_its_ranks(reason, ranks, gone, expected):
    first = transition("the job starts", (0, 1, 2), {})
    assert cause([first]) == "the job starts"
    later = replace(transition(reason, ranks, gone), generation=1, moved=Moved(8, 8, 8, 1))
    assert cause([first, later]) == expected
    lost = cause([first, replace(later, moved=None)])
    assert lost.startswith(expected) == (expected != reason)
    assert lost.endswith("gone back to this step")


def test_a_full_disk_is_told_without_a_traceback(tmp_path):
    reason, full = "failed: OSError: [Errno 28] No space left", OSError(28, "No space left")
    reports = {rank: RankReport(rank, 0, reason, error=full) for rank in (0, 1)}
    with pytest.raises(ConfigError, match=r"rank 0: failed: OSError: \[Errno 28\] No space left"):
        train_resilient.outcome_of(reports, tmp_path)
    late = PeerTimeoutError("a test", found="nothing", why="A fault.", fix="Go on.")
    with pytest.raises(PeerTimeoutError):
        train_resilient.outcome_of({**reports, 2: RankReport(2, 0, "failed", error=late)}, tmp_path)


def test_a_run_that_could_not_go_on_is_refused_before_anything_changes(tmp_path):
    run_words(write_words(tmp_path / "text"), tmp_path / "run", "train.steps=2")
    config = load_config(tmp_path / "run" / "config.toml")
    found = newest(tmp_path / "run")
    assert found is not None
    file = next(found.folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    server = open_store("127.0.0.1", 0)
    place = RankPlace(0, 1, "127.0.0.1", server.port)
    with pytest.raises(ConfigError, match="checksum differs"):
        train_resilient.resilient_rank(place, config, tmp_path / "run")
    wide = apply_overrides(config, [f"train.{key}={2**40}" for key in LENGTHS])
    with pytest.raises(ConfigError, match=r"train\.sequence_length: \d+ tokens"):
        train_resilient.launch_resilient(wide, tmp_path / "run", 1, must_restart=True)
    assert newest(tmp_path / "run") is not None


def test_a_folder_is_of_one_job_and_free_when_its_last_rank_has_left(tmp_path):
    with (
        share_folder(tmp_path, "one", is_first=True),
        share_folder(tmp_path, "one", is_first=False),
    ):
        with pytest.raises(ConfigError, match="which is under way there"):
            share_folder(tmp_path, "two", is_first=True).__enter__()
        with pytest.raises(ConfigError, match="a run of process"):
            hold_folder(tmp_path).__enter__()
        # As where a path is not the same folder on all hosts.
        with pytest.raises(ConfigError, match="does not see there what the first rank has written"):
            share_folder(tmp_path / "elsewhere", "one", is_first=False).__enter__()
    assert not (tmp_path / ".lock").exists()
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="which is under way there"):
        share_folder(tmp_path, "two", is_first=True).__enter__()
    # One whose process was killed leaves its name behind.
    (tmp_path / ".lock").write_text('{"job": "one"}')
    with share_folder(tmp_path, "two", is_first=True):
        assert '"two"' in (tmp_path / ".lock").read_text()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreLostError, 75),
        (PeerTimeoutError, 75),
        (FencedError, 75),
        (TopologyError, 75),
        (StateLostError, 75),
        (ConfigError, 2),
        (DivergenceError, 2),
    ],
)
def test_a_launcher_starts_again_what_can_go_on(error, code):
    made = error("a test", found="nothing", why="A fault.", fix="Go on.")
    assert train_resilient.exit_code_of(made) == code


def test_a_job_of_sources_that_are_not_installed_is_compared_all_the_same(tmp_path, monkeypatch):
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setitem(version_of.__globals__, "version", version)
    facts = train_resilient._facts(Config(), tmp_path, 2)
    assert facts["the version of pcomm-core"] == "0+source"
    assert facts["the number of ranks"] == "2"


def test_the_first_rank_says_on_what_a_run_computes(tmp_path, caplog):
    run_words(write_words(tmp_path / "text"), tmp_path / "run", "train.steps=2")
    config = load_config(tmp_path / "run" / "config.toml")
    caplog.clear()
    with ExitStack() as held, caplog.at_level(logging.INFO, "pcomm.train"):
        train_resilient._prepare(config, tmp_path / "run", 1, "a job", held)
    assert [line for line in caplog.messages if "on the CPU" in line] == ["1 rank on the CPU, fp32"]
