"""From `data.path` to documents, and what is said about paths and files that do not serve."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import sys
from pathlib import Path

import pytest
import zstandard

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.readers import Document
from pcomm.integration.data.sources import (
    content_hash,
    find_files,
    find_sources,
    standard_library_files,
)

# Longer than what is read of the file at once, compressed, so that a cut can fall anywhere.
LONG = "".join(chr(0x4E00 + n * n % 19_997) for n in range(30_000))
ZSTD = zstandard.compress(LONG.encode())


def _documents(*patterns: object, **keys: str) -> list[Document]:
    data = DataConfig(path=tuple(str(pattern) for pattern in patterns), **keys)
    return [document for file in find_files(data) for document in file.documents()]


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    _write(tmp_path / "a.txt", "één\r\nzwei\n")
    assert _documents(tmp_path / "a.txt") == [Document("a.txt", "één\r\nzwei\n")]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    # U+2028 is a line break to str.splitlines, and none to JSON lines.
    lines = [{"text": "one\u2028still one"}, {"text": "", "id": 3}, {"text": "three"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    _write(tmp_path / "a.jsonl", text)
    assert _documents(tmp_path / "a.jsonl") == [
        Document("a.jsonl:1", "one\u2028still one", is_record=True),
        Document("a.jsonl:3", "", is_record=True),
        Document("a.jsonl:5", "three", is_record=True),
    ]


def test_patterns_are_sorted_counted_once_and_named_from_their_common_folder(tmp_path, monkeypatch):
    for name in ("b/2.txt", "b/1.txt", "a/deep/3.txt", "a/skip.md"):
        _write(tmp_path / name, name)
    (tmp_path / "b" / "folder.txt").mkdir()
    names = ["a/deep/3.txt", "b/1.txt", "b/2.txt"]
    patterns = (tmp_path / "**/*.txt", tmp_path / "b/*", tmp_path / "a/../b/1.txt")
    assert [document.name for document in _documents(*patterns)] == names
    monkeypatch.chdir(tmp_path)
    assert [document.name for document in _documents("b/*.txt", "a/deep/3.txt")] == names


def test_a_folder_gives_all_that_can_be_read_but_hidden_files_and_runs(tmp_path, caplog):
    readable = ["a.txt", "b/c/README.MD", "b/d.jsonl", "e.py.gz", "run/notes.txt"]
    for name in readable:
        _write(
            tmp_path / name,
            gzip.compress(b"x", mtime=0) if name.endswith("gz") else '{"text": "x"}',
        )
    for name in (
        "b/.cache/x.txt",
        ".x.txt",
        "picture.png",
        "old/metrics.jsonl",
        "old/tokenizer.json",
    ):
        _write(tmp_path / name, "{}")
    _write(tmp_path / "old/data/manifest.json", "{}")
    (tmp_path / "b" / "again").symlink_to(tmp_path)
    caplog.set_level("INFO")
    files = find_files(DataConfig(path=str(tmp_path)))
    assert [file.name for file in files] == readable
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert f"{tmp_path / 'old'} is left out, since it is the folder of a run" in said
    assert (
        f"left out of {tmp_path}, since data.text_suffixes does not have the ending: 1 in" in said
    )
    own = DataConfig(path=str(tmp_path), text_suffixes=".png")
    assert [file.name for file in find_files(own)] == ["b/d.jsonl", "picture.png"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "mark of big ends"])
def test_a_byte_order_mark_decides(tmp_path, encoding):
    content = (
        codecs.BOM_UTF16_BE + "süß\0".encode("utf-16-be")
        if encoding.startswith("mark")
        else "süß\0".encode(encoding)
    )
    _write(tmp_path / "a.txt", content)
    assert _documents(tmp_path / "a.txt") == [Document("a.txt", "süß\0")]


@pytest.mark.parametrize(
    ("encoding", "errors", "content", "text"),
    [
        ("cp1252", "strict", "“süß”".encode("cp1252"), "“süß”"),
        ("latin-1", "strict", codecs.BOM_UTF8, "ï»¿"),
        ("utf-16-le", "strict", "wide".encode("utf-16-le"), "wide"),
        ("utf-8", "replace", b"a\xffb", "a\ufffdb"),
        ("utf-8", "ignore", b"a\xffb", "ab"),
        ("utf-8", "replace", "\ufffd".encode(), "\ufffd"),
    ],
)
def test_text_is_read_in_the_encoding_that_is_said(tmp_path, encoding, errors, content, text):
    _write(tmp_path / "a.txt", content)
    (found,) = _documents(tmp_path / "a.txt", encoding=encoding, errors=errors)
    assert found == Document("a.txt", text, is_whole=b"\xff" not in content)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=[".gz", ".zst"])
def test_what_is_compressed_is_read_as_what_it_holds(tmp_path, pack):
    suffix = ".gz" if pack is gzip.compress else ".zst"
    lines = "".join(json.dumps({"text": f"{i} {LONG[:i]}"}) + "\n" for i in range(0, 300, 7))
    _write(tmp_path / "plain" / "a.jsonl", lines)
    half = len(lines) // 2
    # Two members, one after the other, are one file, as `cat` makes it.
    packed = pack(lines[:half].encode()) + pack(lines[half:].encode())
    _write(tmp_path / f"a.jsonl{suffix}", packed)
    _write(tmp_path / f"long.txt{suffix.upper()}", pack(LONG.encode()))
    _write(tmp_path / f"none.txt{suffix}", pack(b""))
    *records, long, none = _documents(tmp_path / f"*{suffix}", tmp_path / f"*{suffix.upper()}")
    plain = _documents(tmp_path / "plain")
    assert [record.text for record in records] == [record.text for record in plain]
    assert (long.text, none.text) == (LONG, "")


def test_a_source_of_a_mixture_has_its_own_files_and_no_file_two_sources(tmp_path):
    for name in ("b/1.txt", "a/2.txt", "a/3.txt"):
        _write(tmp_path / name, name)
    paths = (str(tmp_path / "b"), str(tmp_path / "a/*.txt"))
    sources = find_sources(DataConfig(path=paths, weights=(1, 2.5)))
    assert [[file.name for file in source] for source in sources] == [
        ["b/1.txt"],
        ["a/2.txt", "a/3.txt"],
    ]
    data = DataConfig(path=(str(tmp_path), str(tmp_path / "b")), weights=(1, 1))
    with pytest.raises(ConfigError, match=r"b/1\.txt: a file of '.*' and of '.*/b'"):
        find_sources(data)


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    _write(tmp_path / "a[1].txt", "text")
    assert _documents(tmp_path / "a[1].txt") == [Document("a[1].txt", "text")]


def test_the_hash_sees_names_and_bytes_but_not_where_the_corpus_lies(tmp_path):
    def hash_of(folder, files):
        for name, text in files.items():
            _write(tmp_path / folder / name, text)
        data = DataConfig(path=(str(tmp_path / folder / "*.txt"),))
        return content_hash(find_files(data))

    first = hash_of("one", {"a.txt": "ab", "b.txt": "c"})
    assert first == hash_of("two", {"a.txt": "ab", "b.txt": "c"})
    assert first != hash_of("three", {"a.txt": "a", "b.txt": "bc"})
    assert first != hash_of("four", {"a.txt": "ab", "x.txt": "c"})


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("absent.txt", ["absent.txt", "no such file", "'present.txt'"]),
        ("*.text", ["*.text", "a pattern that matches no file"]),
        ("no/a.txt", ["no such file", "no folder"]),
        ("full", ["a folder without a file that can be read, and 2 others", "data.text_suffixes"]),
        ("table.csv", ["a file that ends in '.csv'", ".txt, .md", ".jsonl.gz", "text_suffixes"]),
        ("*.[cl]*", ["3 files with other endings: 2 in '.log', 1 in '.csv'"]),
        ("a.parquet.gz", ["a file that ends in '.parquet.gz'"]),
        ("a" * 5000, ["File name too long", "cannot be looked up"]),
        ("a" * 5000 + "*", ["File name too long", "cannot be looked up"]),
    ],
)
def test_paths_that_do_not_serve(tmp_path, pattern, parts):
    _write(tmp_path / "present.txt", "text")
    for name in ("table.csv", "one.log", "two.log", "a.parquet.gz"):
        _write(tmp_path / name, "1,2")
    for name in ("one.png", ".hidden.txt", ".git/a.txt", "deep/two.png"):
        _write(tmp_path / "full" / name, "1,2")
    with pytest.raises(ConfigError) as raised:
        _documents(tmp_path / pattern)
    for part in ["data.path", *parts]:
        assert part in str(raised.value)


def test_a_home_that_nobody_has():
    with pytest.raises(ConfigError, match=r"~no\.body/a\.txt: Could not determine home"):
        _documents("~no.body/a.txt")


def test_what_is_no_regular_file_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path, kind in (("/dev/null", "a device"), (tmp_path / "pipe.txt", "a pipe")):
        with pytest.raises(ConfigError, match=rf"data\.path: {path}: {kind}, and no regular file"):
            _documents(Path(path))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"dangling\.txt: No such file"):
        _documents(tmp_path / "*.txt")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"fine\nnot \xff fine", ["0xff in line 2, which is no utf-8", "'cp1252'"]),
        ("a.txt", b"\xff\xfea\0b", ["which is no utf-16"]),
        ("a.txt", "text".encode("utf-16-le"), ["zero in every", "data.encoding = 'utf-16-le'"]),
        ("a.txt", "text".encode("utf-16-be"), ["zero in every", "data.encoding = 'utf-16-be'"]),
        (
            "a.txt.gz",
            gzip.compress(b"text" * 99, mtime=0)[:-5],
            ["cut or damaged", "end-of-stream"],
        ),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0) + b"xx", ["cut or damaged"]),
        ("a.txt.gz", b"no gzip", ["cut or damaged: Not a gzipped file"]),
        ("a.txt.zst", ZSTD[:-5], ["cut or damaged: the file ends within a frame"]),
        ("a.txt.zst", ZSTD + b"x" * 9, ["cut or damaged: "]),
        ("a.jsonl", '{"text": "x"}\n{"text": "y"', ["line 2", "no JSON"]),
        ("a.jsonl", b'{"text": "\xff"}', ["line 1", "no JSON"]),
        ("a.jsonl", "[" * 100_000, ["line 1", "no JSON"]),
        ("a.jsonl", '{"txt": "x"}', ["no key 'text'", "['txt']", "Did you mean 'txt'?"]),
        ("a.jsonl", '["text"]', ["line 1", "no key 'text' in"]),
        ("a.jsonl", '{"text": null}', ["line 1", "holds None, a NoneType"]),
        ("a.jsonl", '{"text": "\\ud800"}', ["line 1", "'\\ud800'", "surrogate"]),
    ],
)
def test_content_that_does_not_serve(tmp_path, name, content, parts):
    path = _write(tmp_path / name, content)
    with pytest.raises(ConfigError) as raised:
        _documents(path)
    for part in [str(path), *parts]:
        assert part in str(raised.value)


def test_half_a_pair_from_an_encoding_with_escapes(tmp_path):
    path = _write(tmp_path / "a.txt", b"+2AA-")
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        _documents(path, encoding="utf-7")


def test_parquet_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(1500)]
    parquet.write_table(pyarrow.table({"id": range(1500), "body": texts}), path)
    documents = _documents(path, text_key="body")
    assert [document.text for document in documents] == texts
    assert documents[1499].name == "a.parquet:1499"
    with pytest.raises(ConfigError, match=r"no column 'text'; its columns are \['id', 'body'\]"):
        _documents(path)
    with pytest.raises(ConfigError, match=r"row 0\b.*holds 0, a int"):
        _documents(path, text_key="id")
    _write(path, "no parquet")
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        _documents(path)


def test_what_needs_a_library_names_the_command(tmp_path, monkeypatch):
    for name, library in (("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.setitem(sys.modules, f"{library}.parquet", None)
        with pytest.raises(UnsupportedError, match=f"pip install {library}"):
            _documents(_write(tmp_path / name, "PAR1"))


def test_the_standard_library_is_the_default():
    files = find_files(DataConfig())
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"json/decoder.py", "typing.py"} <= set(names)
    left_out = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    (document,) = files[names.index("json/decoder.py")].documents()
    assert "class JSONDecoder" in document.text


def test_library_files_are_read_as_python_reads_them(tmp_path):
    _write(tmp_path / "latin.py", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    _write(tmp_path / "test" / "skipped.py", "")
    _write(tmp_path / "_sysconfigdata_linux.py", "path = '/home/builder'")
    (file,) = standard_library_files(tmp_path)
    assert [document.text for document in file.documents()] == [
        "# -*- coding: latin-1 -*-\nx = 'é'\n"
    ]
    _write(tmp_path / "latin.py", b"x = '\xe9'\n")
    with pytest.raises(ConfigError, match="no Python source"):
        list(file.documents())


def test_a_python_without_source_asks_for_a_path(tmp_path):
    with pytest.raises(ConfigError, match="no Python source in"):
        standard_library_files(tmp_path)
