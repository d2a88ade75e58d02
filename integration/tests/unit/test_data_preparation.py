"""The token cache: right, shared, rebuilt when stale, and never half-written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data import building, preparation
from pcomm.integration.data.preparation import build_beside, open_prepared, prepare
from pcomm.integration.data.token_cache import write_tokens
from pcomm.integration.files import atomic_write

TEXTS = {f"{i}.txt": f"Text number {i} of all.\n" * (i + 1) for i in range(30)}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return DataConfig(path=(str(folder / "*.txt"),), vocabulary=300, held_out=0.2)


def _snapshot(run_dir):
    """All files but the one that only says when the corpus was last looked at."""
    return {
        str(path.relative_to(run_dir)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and path.name != "read.json"
    }


def _texts(prepared, corpus):
    borders = zip(corpus.offsets, corpus.offsets[1:], strict=False)
    documents = [corpus.tokens[start:stop].tolist() for start, stop in borders]
    assert all(document[-1] == corpus.end_id for document in documents)
    assert not any(corpus.end_id in document[:-1] for document in documents)
    return [prepared.tokenizer.decode(document) for document in documents]


def test_every_document_is_in_one_split_and_ends_with_the_end(data, tmp_path):
    prepared = prepare(data, tmp_path / "run")
    train, held_out = (_texts(prepared, c) for c in (prepared.train, prepared.held_out))
    assert sorted(train + held_out) == sorted(TEXTS.values())
    assert train
    assert held_out
    assert prepared.train.tokens.dtype == np.uint16
    assert prepared.train.num_documents == len(train)


def test_a_document_that_holds_the_end_as_text_stays_whole(data, tmp_path):
    (tmp_path / "corpus" / "1.txt").write_text("a <|end|> b", encoding="utf-8")
    prepared = prepare(data, tmp_path / "run")
    assert "a <|end|> b" in _texts(prepared, prepared.train) + _texts(prepared, prepared.held_out)


def test_the_tokenizer_has_not_seen_the_held_out_documents(data, tmp_path):
    before = prepare(data, tmp_path / "one")
    held_out = _texts(before, before.held_out)
    for name, text in TEXTS.items():
        if text in held_out:
            (tmp_path / "corpus" / name).write_text("zq" * 500, encoding="utf-8")
    after = prepare(data, tmp_path / "two")
    assert _texts(after, after.held_out) == ["zq" * 500] * len(held_out)
    one, two = (tmp_path / run / "tokenizer.json" for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_other_ranks_open_the_same(data, tmp_path):
    prepared, opened = prepare(data, tmp_path / "run"), open_prepared(tmp_path / "run")
    assert isinstance(opened.train.tokens, np.memmap)
    assert (opened.train.tokens == prepared.train.tokens).all()
    assert (opened.held_out.offsets == prepared.held_out.offsets).all()
    assert opened.fingerprint == prepared.fingerprint
    assert opened.train.end_id == opened.tokenizer.end_id
    assert len(opened.train.bytes_per_id) == 300


def test_what_is_fresh_is_not_built_again(data, tmp_path):
    first = prepare(data, tmp_path / "run")
    before = _snapshot(tmp_path / "run")
    assert prepare(data, tmp_path / "run").fingerprint == first.fingerprint
    assert _snapshot(tmp_path / "run") == before


def test_the_same_corpus_elsewhere_gives_the_same_files(data, tmp_path):
    first = prepare(data, tmp_path / "one")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    second = prepare(replace(data, path=(str(tmp_path / "moved/*.txt"),)), tmp_path / "two")
    assert first.fingerprint == second.fingerprint
    one, two = (_snapshot(tmp_path / run) for run in ("one", "two"))
    assert {k: v[0] for k, v in one.items()} == {k: v[0] for k, v in two.items()}


@pytest.mark.parametrize("change", ["text", "file", "vocabulary", "held_out"])
def test_what_is_stale_is_built_again(data, tmp_path, change):
    before = prepare(data, tmp_path / "run")
    if change == "text":
        (tmp_path / "corpus" / "3.txt").write_text("New words.", encoding="utf-8")
    if change == "file":
        (tmp_path / "corpus" / "new.txt").write_text("New words.", encoding="utf-8")
    if change == "vocabulary":
        data = replace(data, vocabulary=290)
    if change == "held_out":
        data = replace(data, held_out=0.5)
    after = prepare(data, tmp_path / "run")
    fresh = prepare(data, tmp_path / "fresh")
    assert after.fingerprint == fresh.fingerprint != before.fingerprint
    assert (after.train.tokens[:] == fresh.train.tokens[:]).all()
    # What another process has mapped stays what it was.
    assert len(_texts(before, before.train)) == before.train.num_documents


def test_another_text_key_is_another_corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "a{i}", "body": "b{i}"}}\n' for i in range(9)))
    data = DataConfig(path=(str(path),), vocabulary=270, held_out=0.5)
    assert _texts(p := prepare(data, tmp_path / "run"), p.train)[0].startswith("a")
    data = replace(data, text_key="body")
    assert _texts(p := prepare(data, tmp_path / "run"), p.train)[0].startswith("b")


DAMAGES = {
    "gone": lambda run: (run / "data" / "train_tokens.npy").unlink(),
    "torn": lambda run: (run / "data" / "train_tokens.npy").write_bytes(b"\x93NUMPY"),
    "empty": lambda run: (run / "data" / "held_out_offsets.npy").write_bytes(b""),
    "json": lambda run: (run / "data" / "manifest.json").write_text("{"),
    "keys": lambda run: (run / "data" / "manifest.json").write_text('{"a": 1}'),
    "manifest": lambda run: (run / "data" / "manifest.json").unlink(),
    "tokenizer": lambda run: (run / "tokenizer.json").unlink(),
    "other": lambda run: _append(run / "tokenizer.json", "\n"),
    "offsets": lambda run: np.save(run / "data" / "train_offsets.npy", np.array([0, 3])),
    "header": lambda run: _flip(run / "data" / "train_offsets.npy", 20, 16),
    "dtype": lambda run: np.save(run / "data" / "train_tokens.npy", np.zeros(4)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_an_error_to_open_and_repaired_to_prepare(data, tmp_path, damage):
    run_dir = tmp_path / "run"
    first = prepare(data, run_dir)
    expected = first.train.tokens[:].tolist()
    damage(run_dir)
    with pytest.raises(ConfigError):
        open_prepared(run_dir)
    again = prepare(data, run_dir)
    assert again.train.tokens.tolist() == expected
    assert again.fingerprint == first.fingerprint


def _append(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text)


def _flip(path, place, bit):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def _change(path, place, value):
    array = np.load(path)
    array[place] = value
    np.save(path, array)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train_tokens.npy", lambda path: _change(path, 5, 7)),
        ("train_tokens.npy", lambda path: _change(path, 5, 60_000)),
        ("held_out_tokens.npy", lambda path: _flip(path, -1, 1)),
        ("train_offsets.npy", lambda path: _change(path, 0, 3)),
    ],
    ids=["another id", "no id", "bit", "offset"],
)
def test_tokens_that_only_their_checksum_betrays_are_made_anew_and_it_is_said(
    data, tmp_path, caplog, name, damage
):
    run_dir = tmp_path / "run"
    prepare(data, run_dir)
    expected = _snapshot(run_dir)
    damage(run_dir / "data" / name)
    prepare(data, run_dir, keep_tokenizer=True)
    (said,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert f"{name}: another checksum; the tokens are made anew" in said
    again = _snapshot(run_dir)
    assert {path: content for path, (content, _) in again.items()} == {
        path: content for path, (content, _) in expected.items()
    }


def test_splits_that_were_exchanged_are_noticed(data, tmp_path):
    folder = tmp_path / "run" / "data"
    prepare(data, tmp_path / "run")
    for kind in ("tokens", "offsets"):
        (folder / f"train_{kind}.npy").rename(folder / "x")
        (folder / f"held_out_{kind}.npy").rename(folder / f"train_{kind}.npy")
        (folder / "x").rename(folder / f"held_out_{kind}.npy")
    with pytest.raises(ConfigError, match="documents and tokens number"):
        open_prepared(tmp_path / "run")


def test_a_crash_while_building_leaves_what_was_there(data, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    prepare(data, run_dir)
    before = _snapshot(run_dir)
    (tmp_path / "corpus" / "3.txt").write_text("New words.", encoding="utf-8")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "_chunks", crash)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, run_dir)
    assert _snapshot(run_dir) == before
    assert sorted(path.name for path in run_dir.iterdir()) == ["data", "tokenizer.json"]
    monkeypatch.undo()
    assert prepare(data, run_dir).fingerprint == prepare(data, tmp_path / "new").fingerprint


@pytest.mark.parametrize("renames", [0, 1], ids=["before the old go", "between old and new"])
def test_a_crash_while_tokens_are_exchanged_leaves_no_mixture(data, tmp_path, monkeypatch, renames):
    run_dir = tmp_path / "run"
    prepare(data, run_dir)
    (tmp_path / "corpus" / "3.txt").write_text("New words. " * 300, encoding="utf-8")
    rename, done = Path.rename, []

    def die(path, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, run_dir)
    with pytest.raises(ConfigError, match="Start the run again"):
        open_prepared(run_dir)
    assert prepare(data, run_dir).fingerprint == prepare(data, tmp_path / "new").fingerprint
    assert sorted(path.name for path in run_dir.iterdir()) == ["data", "tokenizer.json"]


def test_what_is_built_beside_can_be_refused_before_and_after(data, tmp_path):
    run_dir = tmp_path / "run"
    first = prepare(data, run_dir)
    before = _snapshot(run_dir)
    (tmp_path / "corpus" / "3.txt").write_text("New words.", encoding="utf-8")
    fingerprints = []

    def refuse(fingerprint):
        fingerprints.append(fingerprint)
        raise ConfigError("asked", found="found", why="why", fix="fix")

    with pytest.raises(ConfigError, match="found"):
        build_beside(data, run_dir, keep_tokenizer=True, check=refuse)
    assert _snapshot(run_dir) == before
    build_beside(data, run_dir).discard()
    assert _snapshot(run_dir) == before
    build_beside(data, run_dir, keep_tokenizer=True, check=fingerprints.append).take_place()
    assert fingerprints == [open_prepared(run_dir).fingerprint] * 2
    assert fingerprints[0] != first.fingerprint
    assert build_beside(data, run_dir) is None


def test_nothing_was_prepared(tmp_path):
    with pytest.raises(ConfigError, match="Start the run again"):
        open_prepared(tmp_path)


def test_a_resumed_run_keeps_its_tokenizer(data, tmp_path):
    before = prepare(data, tmp_path / "run")
    tokenizer = tmp_path / "run" / "tokenizer.json"
    written_ns = tokenizer.stat().st_mtime_ns
    (tmp_path / "corpus" / "new.txt").write_text("zqzqzq" * 500, encoding="utf-8")
    after = prepare(data, tmp_path / "run", keep_tokenizer=True)
    assert tokenizer.stat().st_mtime_ns == written_ns
    assert after.fingerprint != before.fingerprint
    assert len(_texts(after, after.train) + _texts(after, after.held_out)) == 31


def test_a_resumed_run_needs_a_tokenizer_that_fits(data, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: No such file"):
        prepare(data, tmp_path / "run", keep_tokenizer=True)
    prepare(data, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data\.vocabulary: 280, and a tokenizer with 29\d ids"):
        prepare(replace(data, vocabulary=280), tmp_path / "run", keep_tokenizer=True)


def test_empty_documents_are_skipped_and_counted(data, tmp_path):
    for name, text in (("e1", ""), ("e2", " \n\t")):
        (tmp_path / "corpus" / f"{name}.txt").write_text(text, encoding="utf-8")
    prepared = prepare(data, tmp_path / "run")
    assert prepared.num_empty == 2
    assert prepared.train.num_documents + prepared.held_out.num_documents == 30
    assert open_prepared(tmp_path / "run").num_empty == 2


def test_it_says_how_far_it_is_and_in_how_many_files_it_replaced_bytes(
    data, tmp_path, monkeypatch, caplog
):
    (tmp_path / "corpus" / "3.txt").write_bytes(b"a\xffb" * 40)
    caplog.set_level("INFO")
    for module in (building, preparation):
        monkeypatch.setattr(module, "_SAY_S", 1e-9)
    prepare(replace(data, errors="replace"), tmp_path / "run")
    said = [record.getMessage() for record in caplog.records]
    for words in (
        "hashed 30 of 30 files",
        "read 29 of 30 files",
        "read 30 of 30 documents for the tokenizer (0.0 of 0.0 million characters, ",
        "encoded 7 of 30 documents (",
        "encoded 30 of 30 documents (",
        "1 of 30 files hold bytes that are no utf-8: data.errors = 'replace' has them replaced",
    ):
        assert any(line.startswith(words) for line in said), (words, said)


def test_a_corpus_without_text_is_an_error_that_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("  ")
    with pytest.raises(ConfigError, match="1 documents in 1 files, and no text"):
        prepare(DataConfig(path=(str(tmp_path / "a.txt"),)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "has_more"), [(1, False), (20, False), (21, True)])
def test_all_files_that_cannot_be_read_are_told_at_once(data, tmp_path, number, has_more):
    for place in range(number):
        (tmp_path / "corpus" / f"{place}.txt").write_bytes("süß".encode("latin1"))
    (tmp_path / "corpus" / "0.txt").write_bytes("wide".encode("utf-16-le"))
    with pytest.raises(ConfigError) as raised:
        prepare(data, tmp_path / "run")
    message = str(raised.value)
    assert "0.txt: a zero in every second byte, as utf-16-le has it" in message
    assert "data.encoding = 'utf-16-le'" in message
    if number > 1:
        assert f"{number} of 30 files that cannot be read" in message
        assert message.count("txt: the byte 0xfc in line 1") == 19
    assert ("and 1 more" in message) == has_more


@pytest.mark.parametrize("lines", [1, 3], ids=["shrinks", "grows"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, monkeypatch, lines):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 2)

    def held_out_mask(names, share):
        path.write_text('{"text": "a"}\n' * lines)
        return np.zeros(len(names), dtype=np.bool_)

    monkeypatch.setattr(building, "held_out_mask", held_out_mask)
    with pytest.raises(ConfigError, match="than the 2 counted just before"):
        prepare(DataConfig(path=(str(path),)), tmp_path / "run")
    assert not list(tmp_path.rglob("*.npy"))


def test_without_a_held_out_share_the_split_is_there_and_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    data = DataConfig(path=(str(tmp_path / "a.txt"),), held_out=0, vocabulary=70_000)
    prepared = prepare(data, tmp_path / "run")
    assert prepared.held_out.num_tokens == prepared.held_out.num_documents == 0
    assert prepared.train.tokens.dtype == np.uint32
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["train_documents"] == 1


def test_tokens_are_written_as_numpy_writes_them(tmp_path):
    rows = [[1, 2, 3], [4], list(range(5000))]
    with write_tokens(tmp_path, "train", 65_536) as writer:
        for row in rows:
            writer.append(row)
    found = np.load(tmp_path / "train_tokens.npy")
    assert found.tolist() == [token for row in rows for token in row]
    assert np.load(tmp_path / "train_offsets.npy").tolist() == [0, 3, 4, 5004]


def test_an_atomic_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def crash():
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crash()
    assert path.read_bytes() == b"old"
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_tokens_do_not_depend_on_how_much_is_tokenised_at_once(data, tmp_path, monkeypatch):
    """At once means up to 1 Mi characters: here all texts, one, or some."""
    sizes = sorted(len(text) for text in TEXTS.values())
    assert sum(sizes) < building._CHUNK_CHARACTERS == 1 << 20
    whole = prepare(data, tmp_path / "whole")
    for most in (1, sizes[10], sizes[10] + 1, sum(sizes), sum(sizes) + 1):
        monkeypatch.setattr(building, "_CHUNK_CHARACTERS", most)
        parts = prepare(data, tmp_path / str(most))
        for mine, theirs in ((parts.train, whole.train), (parts.held_out, whole.held_out)):
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert list(mine.offsets) == list(theirs.offsets)


def test_a_single_text_is_cut_into_what_is_learnt_and_its_end(tmp_path):
    lines = [f"line {n} of the only text\n" for n in range(400)]
    (tmp_path / "input.txt").write_text("".join(lines))
    data = DataConfig(path=(str(tmp_path / "input.txt"),), vocabulary=300)
    prepared = prepare(data, tmp_path / "run")
    [train], [held_out] = (_texts(prepared, c) for c in (prepared.train, prepared.held_out))
    assert train + held_out == "".join(lines)
    assert held_out.splitlines(keepends=True) == lines[380:]


def test_sides_of_records_do_not_depend_on_their_lines(tmp_path):
    records = [f'{{"text": "record number {n}"}}\n' for n in range(200)]
    path = tmp_path / "a.jsonl"
    data = DataConfig(path=(str(path),), vocabulary=300, held_out=0.2)
    path.write_text("".join(records))
    before = prepare(data, tmp_path / "one")
    # A new first line, and another order.
    path.write_text('{"text": "first of all"}\n' + "".join(reversed(records)))
    after = prepare(data, tmp_path / "two")
    assert 20 < before.held_out.num_documents < 60
    moved = set(_texts(before, before.held_out)) ^ set(_texts(after, after.held_out))
    assert moved <= {"first of all"}
