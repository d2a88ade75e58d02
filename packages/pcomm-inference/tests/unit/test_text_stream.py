"""Text while tokens are written: whole characters, and nothing of a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_support.trained_tokenizers import Tokens, byte_fallback, byte_level, unigram
from pcomm.inference.text import TextStream

CORPUS = [
    "the cat sat on the mat, and the dog did not",
    "日本語の文章と中文的句子 한국어 문장",
    "naïve café — “quoted” €5 🙂🙂 👩‍👩‍👧 🇩🇪",
    "def f(x): return {'a': [1, 2], 'b': x}",
]


@pytest.fixture(scope="module", params=[byte_level, unigram, byte_fallback])
def tokens(request) -> Tokens:
    make = request.param
    return make() if make is byte_fallback else make(CORPUS)


@pytest.fixture(scope="module")
def byte_tokens() -> Tokens:
    return byte_level(CORPUS)


def deltas(tokens: Tokens, ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """What each token adds and, last, what the end adds."""
    stream = TextStream(tokens, stop)
    found = [stream.push(token_id).text for token_id in ids]
    return [*found, stream.flush()]


def up_to_the_first(text: str, stop: Sequence[str]) -> str:
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    return text[: min(ends)[1]] if ends else text


# Single bytes of several replacement characters in a row are taken for bytes that are no UTF-8.
texts = (
    st.lists(st.sampled_from([*CORPUS, "🙂", " ", "  ", "日本", "\n", "�", "𝄞", "x"])).map("".join)
    | st.text(max_size=30)
).filter(lambda text: "����" not in text)


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_deltas_together_are_the_decoded_text(tokens, text) -> None:
    ids = tokens.encode(text)
    found, whole = deltas(tokens, ids), tokens.decode(ids)
    assert "".join(found) == whole
    # A replacement character is shown only where the text itself has one.
    assert sum(one.count("�") for one in found) == whole.count("�")


@settings(max_examples=30, deadline=None)
@given(data=st.data(), words=st.lists(st.sampled_from([*CORPUS, "x", "🙂"]), min_size=1))
def test_prompt_and_text_together_are_the_decoded_whole(tokens, data, words) -> None:
    ids = tokens.encode(" ".join(words))
    whole = tokens.decode(ids)
    cut = data.draw(st.integers(0, len(ids)).filter(lambda n: "�" not in tokens.decode(ids[:n])))
    stream = TextStream(tokens, (), prompt=ids[:cut])
    text = "".join(stream.push(token_id).text for token_id in ids[cut:]) + stream.flush()
    assert tokens.decode(ids[:cut]) + text == whole


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_prompt_of_single_bytes_is_looked_at_from_the_begin_of_a_character(cut: int) -> None:
    tokens = byte_fallback()
    text = "👩‍👩‍👧" * 4
    ids = tokens.encode(text)
    # Some 4 and 3 bytes: prompts whose last tokens begin within a character, and others.
    begin = len(tokens.encode(text[: 2 * cut]))
    stream = TextStream(tokens, (), prompt=ids[:begin])
    found = "".join(stream.push(token_id).text for token_id in ids[begin:]) + stream.flush()
    assert found == text[2 * cut :]


@pytest.mark.parametrize("number", [1, 24, 25, 60])
def test_tokens_without_text_change_nothing(tokens, number) -> None:
    special = next(iter(tokens.tokenizer.get_added_tokens_decoder()))
    begin, end = tokens.encode("the cat"), tokens.encode(" sat")
    ids = [*[special] * number, *begin, *[special] * number, *end]
    assert "".join(deltas(tokens, ids)) == tokens.decode(ids) == tokens.decode([*begin, *end])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), text=texts)
def test_nothing_of_a_stop_string_is_shown(tokens, data, text) -> None:
    ids = tokens.encode(text)
    whole = tokens.decode(ids)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    inside = cuts.map(lambda cut: whole[cut[0] : sum(cut)]).filter(bool)
    strings = st.text(min_size=1, max_size=4) if not whole else inside | st.text(min_size=1)
    stop = data.draw(st.lists(strings, min_size=1, max_size=8))
    expected, shown = up_to_the_first(whole, stop), ""
    for delta in deltas(tokens, ids, stop):
        shown += delta
        assert expected.startswith(shown)
    assert shown == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_decoded_text_also_bytes_that_are_no_characters(
    byte_tokens, data
) -> None:
    number = byte_tokens.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, number - 1), max_size=80))
    assert "".join(deltas(byte_tokens, ids)) == byte_tokens.decode(ids)


@pytest.mark.parametrize("length", [24, 25, 26, 300])
@pytest.mark.parametrize("text", ["\x80", "\xe4", "\xf0\x9f", "\xf0\x9f\x98"])
def test_bytes_that_never_become_characters_are_shown_in_time(byte_tokens, text, length) -> None:
    # The alphabet writes each byte as one character; these are bytes of unfinished characters.
    alphabet = dict(zip(range(256), _byte_alphabet(), strict=True))
    ids = [byte_tokens.tokenizer.token_to_id(alphabet[ord(one)]) for one in text] * length
    found = deltas(byte_tokens, ids)
    assert "".join(found) == byte_tokens.decode(ids)
    # Up to 24 tokens, of a byte each, wait for one that makes a character of them.
    assert len(found[-1]) <= 24


def _byte_alphabet() -> list[str]:
    """GPT-2's characters for the bytes from 0 to 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def test_whole_characters_among_single_bytes_stay_as_they_are() -> None:
    # The library makes U+FFFD of all bytes in a row, when the last of them is wrong.
    tokens = byte_fallback()
    byte = {value: tokens.tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in "é中".encode()] + [byte[0xE4]] + tokens.encode("a")[-1:]
    assert deltas(tokens, ids) == ["", "é", "", "", "中", "", "�a", ""]
    assert tokens.decode(ids) == "������a"


@pytest.mark.parametrize("kind", ["words", "broken", "special", "specials first", "characters"])
def test_the_work_for_a_token_does_not_depend_on_the_length(byte_tokens, kind) -> None:
    special = byte_tokens.tokenizer.token_to_id("<|end|>")
    broken = byte_tokens.tokenizer.token_to_id(_byte_alphabet()[0x80])
    ids = {
        "words": byte_tokens.encode(" the cat sat" * 200),
        "broken": [broken] * 600,
        "special": [*byte_tokens.encode("a"), *[special] * 600],
        "specials first": [*[special] * 600, *byte_tokens.encode("a")],
        "characters": byte_tokens.encode("𝄞" * 150),
    }[kind]
    byte_tokens.decoded = 0
    found = deltas(byte_tokens, ids)
    assert byte_tokens.decoded <= 40 * len(ids)
    assert "".join(found) == byte_tokens.decode(ids)


def test_min_tokens_is_for_stop_strings_too(byte_tokens) -> None:
    ids = [byte_tokens.encode(letter)[0] for letter in "xyxyxy"]
    for min_tokens, expected in {0: "", 1: "", 2: "xy", 3: "xy", 4: "xyxy", 6: "xyxyxy"}.items():
        stream = TextStream(byte_tokens, ["xy"], min_tokens=min_tokens)
        text = "".join(stream.push(token_id).text for token_id in ids) + stream.flush()
        assert text == expected
        assert stream.is_stopped == (min_tokens < 6)
