"""Tokens that runs share: right whatever happens to the folder, and never needed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data import building, preparation, shared_tokens, sources
from pcomm.integration.data.manifest import read_manifest, write_manifest
from pcomm.integration.data.preparation import open_prepared, prepare
from pcomm.integration.data.shared_tokens import cache_folder


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.md").write_text(f"word{number} and more\n" * (number + 3))
    return DataConfig(
        path=str(tmp_path / "text"), vocabulary=280, held_out=0.2, cache=str(tmp_path / "cache")
    )


@pytest.fixture
def builds(monkeypatch):
    """How often a corpus was encoded."""
    made = []
    build = building.build
    monkeypatch.setattr(preparation, "build", lambda *words: made.append(words) or build(*words))
    return made


def _files(run_dir):
    """What the tokens of a run are, byte for byte."""
    names = ["tokenizer.json", *(f"data/{name}" for name in ("manifest.json", "train_tokens.npy"))]
    return {name: (run_dir / name).read_bytes() for name in names}


def _entry(data) -> Path:
    (entry,) = Path(data.cache, "tokens").iterdir()
    return entry


def _said(caplog, level):
    return [
        r.getMessage() for r in caplog.records if r.levelname == level and r.name == "pcomm.train"
    ]


def test_a_second_run_takes_the_tokens_of_the_first_and_keeps_them_without_it(
    data, tmp_path, builds, caplog
):
    caplog.set_level("INFO")
    one = prepare(data, tmp_path / "one")
    entry = _entry(data)
    assert any(
        f"kept for other runs on this text: {entry}" in line for line in _said(caplog, "INFO")
    )
    two = prepare(data, tmp_path / "two")
    assert len(builds) == 1
    assert any(
        line.startswith(f"took the tokens of this text from {entry}, ")
        for line in _said(caplog, "INFO")
    )
    assert two.fingerprint == one.fingerprint
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
    # One copy on the disk for all three.
    assert (entry / "train_tokens.npy").stat().st_nlink == 3
    shutil.rmtree(data.cache)
    prepare(data, tmp_path / "two")
    assert len(builds) == 1
    assert open_prepared(tmp_path / "two").train.tokens.tolist() == one.train.tokens.tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: replace(data, vocabulary=290),
        lambda data: replace(data, held_out=0.5),
        lambda data: replace(data, encoding="latin-1"),
        lambda data: replace(data, errors="replace"),
        lambda data: replace(data, weights=(1.0,)),
        lambda data: Path(data.path[0], "0.md").write_text("another text") and data,
    ],
    ids=["vocabulary", "held_out", "encoding", "errors", "weights", "text"],
)
def test_what_changes_tokens_is_another_entry(data, tmp_path, builds, change):
    prepare(data, tmp_path / "one")
    prepare(change(data), tmp_path / "two")
    assert len(builds) == 2
    assert len(list(Path(data.cache, "tokens").iterdir())) == 2


def test_a_run_that_keeps_its_tokenizer_takes_tokens_of_that_one_alone(data, tmp_path, builds):
    prepare(data, tmp_path / "one")
    (tmp_path / "text" / "new.md").write_text("zqzq" * 99)
    kept = prepare(data, tmp_path / "one", keep_tokenizer=True)
    prepare(data, tmp_path / "two")
    assert len(builds) == 3
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    shutil.rmtree(tmp_path / "three" / "data")
    assert prepare(data, tmp_path / "three", keep_tokenizer=True).fingerprint == kept.fingerprint
    assert len(builds) == 3


def _of_another_version(entry):
    write_manifest(entry, replace(read_manifest(entry), sources="0" * 32))


DAMAGES = {
    "cut": (lambda e: os.truncate(e / "train_tokens.npy", 150), "another checksum"),
    "a bit": (lambda e: _flip(e / "held_out_tokens.npy"), "held_out_tokens.npy: another checksum"),
    "a file gone": (lambda e: (e / "train_offsets.npy").unlink(), "a missing file"),
    "a folder": (lambda e: _folder_in_place(e / "train_tokens.npy"), "Is a directory"),
    "no tokenizer": (lambda e: (e / "tokenizer.json").unlink(), "No such file"),
    "another tokenizer": (lambda e: (e / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "no manifest": (lambda e: (e / "manifest.json").unlink(), "manifest.json: No such file"),
    "a version before": (_of_another_version, "tokens of another version of pcomm"),
    "other keys": (lambda e: (e / "manifest.json").write_text('{"a": 1}'), "manifest.json"),
    "empty": (lambda e: [path.unlink() for path in e.iterdir()], "manifest.json: No such file"),
}


def _folder_in_place(path):
    path.unlink()
    path.mkdir()


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "found"), DAMAGES.values(), ids=DAMAGES)
def test_an_entry_that_cannot_be_used_is_said_and_made_anew(
    data, tmp_path, builds, caplog, damage, found
):
    prepare(data, tmp_path / "one")
    expected = _files(tmp_path / "one")
    # The run's own files are links to the same content.
    shutil.rmtree(tmp_path / "one")
    damage(_entry(data))
    prepare(data, tmp_path / "two")
    assert _files(tmp_path / "two") == expected
    (line,) = _said(caplog, "WARNING")
    assert found in line
    assert str(_entry(data)) in line
    assert "made anew" in line
    prepare(data, tmp_path / "three")
    assert len(builds) == 2
    assert len(_said(caplog, "WARNING")) == 1


def _no_links(source, target):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_on_another_file_system_tokens_are_copied(data, tmp_path, builds, monkeypatch):
    monkeypatch.setattr(os, "link", _no_links)
    prepare(data, tmp_path / "one")
    prepare(data, tmp_path / "two")
    assert len(builds) == 1
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
    assert (_entry(data) / "train_tokens.npy").stat().st_nlink == 1


@pytest.mark.parametrize("trouble", ["full", "a file in the way", "read-only"])
def test_a_run_goes_on_without_a_folder_that_cannot_be_written(
    data, tmp_path, caplog, monkeypatch, trouble
):
    folder = Path(data.cache, "tokens")
    if trouble == "a file in the way":
        Path(data.cache).write_text("")
    else:
        number = errno.ENOSPC if trouble == "full" else errno.EROFS

        def refuse(source, target):
            Path(target).write_bytes(b"half")
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", _no_links)
        monkeypatch.setattr(shutil, "copyfile", refuse)
    assert prepare(data, tmp_path / "one").train.num_tokens
    (line,) = _said(caplog, "WARNING")
    assert line.startswith(f"no tokens are kept in {folder} for other runs: ")
    assert {"full": "No space left", "a file in the way": "", "read-only": "Read-only"}[
        trouble
    ] in line
    assert "this run goes on without" in line
    assert not folder.is_dir() or not list(folder.iterdir())


def test_an_entry_stays_when_it_is_the_run_that_has_no_space(
    data, tmp_path, builds, caplog, monkeypatch
):
    prepare(data, tmp_path / "one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", _no_links)
        patched.setattr(shutil, "copyfile", _full)
        prepare(data, tmp_path / "two")
    assert "cannot be used (No space left on device)" in _said(caplog, "WARNING")[0]
    prepare(data, tmp_path / "three")
    assert len(builds) == 2


def _full(source, target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _prepare_after(barrier, data, run_dir):
    barrier.wait()
    prepare(data, run_dir)


def test_runs_that_write_at_once_leave_one_whole_entry(data, tmp_path):
    """All of them look before any has written: a barrier stands between the two."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    keep = shared_tokens.SharedTokens.keep

    def keep_together(self, *words):
        barrier.wait()
        keep(self, *words)

    runs = [tmp_path / f"run{number}" for number in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_tokens.SharedTokens, "keep", keep_together)
        ranks = [context.Process(target=_prepare_after, args=(barrier, data, run)) for run in runs]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert _files(runs[0]) == _files(runs[1]) == _files(runs[2])
    assert read_manifest(_entry(data)) == read_manifest(runs[0] / "data")


def test_what_a_run_left_half_done_is_removed_after_a_day(data, tmp_path):
    for name, age_s in ((".old.1", 25 * 3600), (".new.2", 23 * 3600)):
        left = Path(data.cache, "tokens", name)
        left.mkdir(parents=True)
        os.utime(left, (time.time() - age_s,) * 2)
    prepare(data, tmp_path / "one")
    hidden = [path.name for path in Path(data.cache, "tokens").glob(".*")]
    assert hidden == [".new.2"]


def test_a_text_that_changed_while_it_was_read_is_not_kept(data, tmp_path, monkeypatch, caplog):
    build = building.build

    def build_and_change(*words):
        build(*words)
        Path(data.path[0], "3.md").write_text("changed, and longer than it was before\n" * 9)

    monkeypatch.setattr(preparation, "build", build_and_change)
    prepare(data, tmp_path / "one")
    assert not Path(data.cache).exists()
    assert "changed while it was read" in _said(caplog, "WARNING")[0]


@pytest.mark.parametrize(
    ("setting", "environ", "folder"),
    [
        ("auto", {}, "/home/of/me/.cache/pcomm/tokens"),
        ("auto", {"XDG_CACHE_HOME": "/caches"}, "/caches/pcomm/tokens"),
        ("auto", {"XDG_CACHE_HOME": "relative"}, "/home/of/me/.cache/pcomm/tokens"),
        ("auto", {"XDG_CACHE_HOME": "/caches", "PCOMM_CACHE": "/mine"}, "/mine/tokens"),
        ("auto", {"PCOMM_CACHE": "none"}, None),
        ("none", {"PCOMM_CACHE": "/mine"}, None),
        ("/other", {"PCOMM_CACHE": "none"}, "/other/tokens"),
    ],
)
def test_the_folder_is_what_the_key_says_then_the_variable_then_the_users(
    monkeypatch, setting, environ, folder
):
    for name in ("XDG_CACHE_HOME", "PCOMM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/of/me", **environ}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(setting) == (folder and Path(folder))


def test_a_corpus_that_has_not_changed_is_not_read_again(data, tmp_path, monkeypatch):
    """Files that have just changed are compared by content; two seconds later by their times."""
    hashed = []
    content_hash = sources.content_hash
    monkeypatch.setattr(
        preparation, "content_hash", lambda files: hashed.append(1) or content_hash(files)
    )
    prepare(data, tmp_path / "run")
    prepare(data, tmp_path / "run")
    assert len(hashed) == 2
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + sources._TICK_NS)
    for expected in (3, 3, 3):
        prepare(data, tmp_path / "run")
        assert len(hashed) == expected
    path = Path(data.path[0], "3.md")
    content, stat = path.read_text(), path.stat()
    path.write_text(content.replace("word3", "w0rd3"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = open_prepared(tmp_path / "run").fingerprint
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 2 * sources._TICK_NS)
    assert prepare(data, tmp_path / "run").fingerprint != before
    assert len(hashed) == 4
