"""Byte-level BPE: exact, deterministic, and safe against text that looks like a special token."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from pcomm.core.errors import ConfigError
from pcomm.integration.data.sources import standard_library_files
from pcomm.integration.data.tokenizer import (
    END,
    Beside,
    BytePairTokenizer,
    every,
    load_tokenizer,
    train_tokenizer,
)

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


def _with_blanks_as_signs() -> BytePairTokenizer:
    """A tokenizer in the manner of Llama 2: a sign for a blank, and tokens for single bytes."""
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *single])}
    for word in ("\u2581", "a", "b", "\u00e9", "ab", "\u2581a"):
        vocabulary[word] = len(vocabulary)
    merges = [("a", "b"), ("\u2581", "a")]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("<tab>")])
    return BytePairTokenizer(inner, end_id=1)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab \u00e9\u732b\U0001f642x")))
def test_bytes_are_counted_for_tokens_that_are_text_or_single_bytes(text):
    tokenizer = _with_blanks_as_signs()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_per_id(300)[ids].sum() == len(text.encode())


def test_special_tokens_stand_for_no_text_and_other_added_ones_for_theirs():
    tokenizer = _with_blanks_as_signs()
    counts = tokenizer.bytes_per_id(300)
    assert (counts[0], counts[tokenizer.end_id]) == (0, 0)
    assert counts[tokenizer.num_ids - 1] == len("<tab>")


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


def plain(texts: list[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Byte-level BPE as `tokenizers` has it, without a bound for words."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return found


def test_a_bound_for_words_changes_no_text_that_has_words():
    texts = [file.path.read_text() for file in standard_library_files() if file.name[0] == "a"]
    assert sum(map(len, texts)) > 1 << 18
    oracle, mine = plain(texts, 600), train_tokenizer(texts, 600)
    for text in texts:
        assert mine.encode(text) == oracle.encode(text).ids


@pytest.mark.parametrize("kind", ["x", "7", "=", " ", "\u65e5", "\n"])
@pytest.mark.parametrize("length", [255, 256, 257, 512, 100_000])
def test_no_word_is_longer_than_its_bound(kind, length):
    """The time that a word takes grows with the square of its length."""
    text = f"def{kind * length}\u00e9nd"
    pre_tokenizer = TOKENIZER._tokenizer.pre_tokenizer
    pieces = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    assert max(stop - start for start, stop in pieces) <= 256 + len("def\u00e9nd")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_half_a_megabyte_without_a_blank():
    text = "".join(chr(97 + n * n % 26) for n in range(1 << 19))
    tokenizer = train_tokenizer([text], 320)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# -- interruptible ---------------------------------------------------------------------------


def test_a_call_beside_returns_or_raises_what_it_does():
    assert Beside().run(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        Beside().run(lambda: 1 // 0, lambda: None)
    with pytest.raises(ConfigError, match="found"):
        train_tokenizer(failing(), 300)


def failing():
    yield "text"
    raise ConfigError("asked", found="found", why="why", fix="fix")


def test_who_waits_can_leave_and_the_call_gets_no_more():
    is_over, fed, beside = threading.Event(), [], Beside()
    ended = threading.Event()

    def call():
        items = beside.fed(itertools.count())
        fed.append(next(items))
        assert is_over.wait(60)
        with pytest.raises(InterruptedError):
            fed.append(next(items))
        ended.set()

    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        beside.run(call, leave)
    is_over.set()
    assert ended.wait(60)
    assert fed == [0]


def test_a_tick_speaks_once_in_a_while():
    times, said = iter([0.0, 1.0, 5.0, 6.0, 9.9, 12.0]), []
    tick = every(5.0, lambda: next(times), said.append)
    for _ in range(5):
        tick()
    assert said == [5.0, 12.0]
