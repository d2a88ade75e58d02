"""From `data.path` to documents, and what is said about paths and files that do not serve."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.sources import (
    Document,
    content_hash,
    find_files,
    standard_library_files,
)


def _documents(*patterns: object, text_key: str = "text") -> list[Document]:
    data = DataConfig(path=tuple(str(pattern) for pattern in patterns), text_key=text_key)
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
        (".", ["a folder", '/**/*.txt"]']),
        ("table.csv", ["a file that ends in '.csv'", ".txt, .jsonl, .parquet"]),
        ("*.[cm]*", ["3 files with other endings: 2 in '.md', 1 in '.csv'"]),
        ("a" * 5000, ["File name too long", "cannot be looked up"]),
        ("a" * 5000 + "*", ["File name too long", "cannot be looked up"]),
    ],
)
def test_paths_that_do_not_serve(tmp_path, pattern, parts):
    _write(tmp_path / "present.txt", "text")
    for name in ("table.csv", "one.md", "two.md"):
        _write(tmp_path / name, "1,2")
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
        ("a.txt", b"fine\nnot \xff fine", ["0xff in line 2", "iconv -f latin1"]),
        ("a.txt", "text".encode("utf-16"), ["mark of UTF-16", "iconv -f utf-16 -t utf-8 a.txt"]),
        ("a.txt", b"\xfe\xff" + "text".encode("utf-16-be"), ["mark of UTF-16"]),
        ("a.txt", "text".encode("utf-32"), ["mark of UTF-32", "iconv -f utf-32 -t utf-8 a.txt"]),
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


def test_parquet_without_pyarrow_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        _documents(_write(tmp_path / "a.parquet", "PAR1"))


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
