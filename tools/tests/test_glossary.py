"""The glossary is short, has one line a word, and names what is there."""

import re
from pkgutil import resolve_name

import pytest

from repository import ROOT

MOST_WORDS = 40
PAGE = (ROOT / "docs" / "glossary.md").read_text()
LINES = re.findall(r"^\| (.+?) \| (.+) \| `(.+)` \|$", PAGE, re.MULTILINE)


def test_it_has_at_most_40_words_each_once():
    words = [word for entry, _, _ in LINES for word in entry.split(", ")]
    assert len(LINES) >= 20
    assert len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)
    # Every line of the table is read, but for its head and rule.
    assert len(re.findall(r"^\|", PAGE, re.MULTILINE)) == len(LINES) + 2


@pytest.mark.parametrize(("word", "meaning", "carrier"), LINES, ids=[line[0] for line in LINES])
def test_what_carries_a_word_is_there(word, meaning, carrier):
    assert meaning.endswith(".")
    assert resolve_name(carrier) is not None, word
