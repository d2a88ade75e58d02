"""Byte-level BPE: exact, deterministic, and safe against text that looks like a special token."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.integration.data.tokenizer import END, load_tokenizer, train_tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # é\n" for i in range(200)]
TOKENIZER = train_tokenizer(TEXTS, 400)
BYTES_PER_ID = TOKENIZER.bytes_per_id(500)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_and_its_bytes_are_counted(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.end_id not in ids
    assert BYTES_PER_ID[ids].sum() == len(text.encode())


def test_merges_make_text_shorter():
    text = TEXTS[7]
    assert len(TOKENIZER.encode(text)) < len(text) / 2


def test_text_that_looks_like_an_end_is_text():
    text = f"a{END}b"
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.end_id not in ids
    assert list(TOKENIZER.encode_all([text, "b"])) == [ids, TOKENIZER.encode("b")]
    assert TOKENIZER.decode([*ids, TOKENIZER.end_id]) == text


def test_ids_that_stand_for_nothing_count_no_bytes_and_give_no_text():
    assert TOKENIZER.num_ids == 400
    assert TOKENIZER.decode([450, *TOKENIZER.encode("x")]) == "x"
    assert (BYTES_PER_ID[400:] == 0).all()
    assert BYTES_PER_ID[TOKENIZER.end_id] == 0


def test_a_small_corpus_gives_fewer_ids():
    assert 257 <= train_tokenizer(["abc"], 2048).num_ids < 270


def test_the_same_texts_give_the_same_file_in_another_process(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from pcomm.integration.data.tokenizer import train_tokenizer\n"
        "texts = [f'def function_{i}(x):\\n    return x + {i}  # é\\n' for i in range(200)]\n"
        "train_tokenizer(texts, 400).save(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other.json")], check=True)
    TOKENIZER.save(tmp_path / "this.json")
    assert (tmp_path / "this.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_a_saved_tokenizer_reads_back(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    text = f"{TEXTS[3]}{END}"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.end_id == TOKENIZER.end_id
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file"),
        (b"{", "EOF"),
        (b"\xff", "utf-8"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "without the token"),
    ],
    ids=["missing", "torn", "bytes", "foreign"],
)
def test_a_file_that_is_no_tokenizer_of_a_run(tmp_path, content, part):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(path)
    assert part in str(raised.value)
    assert str(path) in str(raised.value)
