"""What a resilient run says when ranks die or come back, and where no run is found."""

from __future__ import annotations

import socket

import pytest
import torch

from integration_support.short_runs import run_words, write_words
from pcomm.core.errors import ConfigError, PeerTimeoutError
from pcomm.core.process import RankPlace, RankReport, ResilientRanks
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.commands import train_resilient
from pcomm.integration.config.toml import apply_overrides, load_config
from pcomm.integration.train.resilient import cause
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
    assert cause([first, transition(reason, ranks, gone)]) == expected


def test_a_closed_port_is_told_without_a_store(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # It would try for minutes.
    monkeypatch.setattr(RankPlace, "store", lambda *_: pytest.fail("it connects"))
    with pytest.raises(ConfigError, match="no launcher there"):
        train_resilient.join_resilient(f"127.0.0.1:{port}", 1, tmp_path)


def test_a_rank_that_comes_back_imports_and_takes_the_threads_of_the_others_before_it_joins(
    tmp_path, monkeypatch
):
    """From the moment that it joins the others wait for it, and torch takes seconds."""
    order: list[object] = []
    told = {"size": 2, "config": {}, "folder": str(tmp_path), "threads": 3}
    monkeypatch.setattr(torch, "set_num_threads", order.append)
    monkeypatch.setattr(train_resilient, "_run_at", lambda _: (told, ""))
    monkeypatch.setattr(train_resilient.importlib, "import_module", order.append)
    monkeypatch.setattr(train_resilient, "resilient_rank", lambda *_: order.append("joins"))
    train_resilient.join_resilient("127.0.0.1:1", 1, tmp_path)
    assert order == ["pcomm.integration.train.resilient", "torch._dynamo", 3, "joins"]


def test_an_error_of_the_run_is_not_that_of_the_address(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError("No space left on device")

    told = {"size": 2, "config": {}, "folder": str(tmp_path), "threads": torch.get_num_threads()}
    monkeypatch.setattr(train_resilient, "_run_at", lambda _: (told, ""))
    monkeypatch.setattr(train_resilient, "resilient_rank", fails)
    with pytest.raises(OSError, match="No space left"):
        train_resilient.join_resilient("127.0.0.1:1", 1, tmp_path)
    with pytest.raises(ConfigError, match="a run of 2 ranks"):
        train_resilient.join_resilient("127.0.0.1:1", 2, tmp_path)


def test_a_full_disk_is_told_without_a_traceback(tmp_path):
    reason, full = "failed: OSError: [Errno 28] No space left", OSError(28, "No space left")
    reports = {rank: RankReport(rank, 0, reason, error=full) for rank in (0, 1)}
    with pytest.raises(ConfigError, match=r"rank 0: failed: OSError: \[Errno 28\] No space left"):
        train_resilient._outcome(reports, tmp_path)
    late = PeerTimeoutError("a test", found="nothing", why="A fault.", fix="Go on.")
    with pytest.raises(PeerTimeoutError):
        train_resilient._outcome({**reports, 2: RankReport(2, 0, "failed", error=late)}, tmp_path)


def test_the_folder_of_another_run_is_left_alone(tmp_path, monkeypatch):
    """The rank could be the one that writes metrics, and removes rows that come later."""
    told = {"size": 2, "config": {}, "folder": str(tmp_path / "run")}
    monkeypatch.setattr(train_resilient, "_run_at", lambda _: (told, ""))
    monkeypatch.setattr(train_resilient, "resilient_rank", lambda *_: pytest.fail("it joins"))
    with pytest.raises(ConfigError, match=f"Give --out {tmp_path / 'run'}"):
        train_resilient.join_resilient("127.0.0.1:1", 1, tmp_path / "other")


def test_a_run_that_could_not_go_on_is_refused_before_a_rank_starts(tmp_path, monkeypatch):
    run_words(write_words(tmp_path / "text"), tmp_path / "run", "train.steps=2")
    monkeypatch.setattr(ResilientRanks, "start", lambda *_: pytest.fail("ranks start"))
    config = load_config(tmp_path / "run" / "config.toml")
    found = newest(tmp_path / "run")
    assert found is not None
    file = next(found.folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match="checksum differs"):
        train_resilient.launch_resilient(config, tmp_path / "run", 1, must_restart=False)
    wide = apply_overrides(config, [f"train.{key}={2**40}" for key in LENGTHS])
    with pytest.raises(ConfigError, match=r"train\.sequence_length: \d+ tokens"):
        train_resilient.launch_resilient(wide, tmp_path / "new", 1, must_restart=False)
