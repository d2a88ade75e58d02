"""Words for sets of ranks, where they are spelled and where they are too long for that."""

from __future__ import annotations

import pytest

from pcomm.core.control.control import format_ranks, parse_ranks, ranks_key

FORTY = [2, *range(10, 36, 2)]


@pytest.mark.parametrize(
    ("ranks", "length"), [(FORTY[1:], 38), (FORTY, 40), ([*range(10, 38, 2)], 41)], ids=str
)
def test_a_word_is_spelled_up_to_forty_characters(ranks: list[int], length: int) -> None:
    text = format_ranks(ranks)
    assert len(text) == length
    assert parse_ranks(text) == tuple(ranks)
    assert (ranks_key(ranks) == text) == (length <= 40)
    assert len(ranks_key(ranks)) <= 40
