"""Words for sets of ranks, where they are spelled and where they are too long for that."""

from __future__ import annotations

import pytest

from pcomm.core.control.rank_sets import parsed, spelled, word_for

FORTY = [2, *range(10, 36, 2)]


@pytest.mark.parametrize(
    ("ranks", "length"), [(FORTY[1:], 38), (FORTY, 40), ([*range(10, 38, 2)], 41)], ids=str
)
def test_a_word_is_spelled_up_to_forty_characters(ranks: list[int], length: int) -> None:
    text = spelled(ranks)
    assert len(text) == length
    assert parsed(text) == tuple(ranks)
    assert (word_for(ranks) == text) == (length <= 40)
    assert len(word_for(ranks)) <= 40
