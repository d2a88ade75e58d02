"""Where documents are cut, against trying every way to cut them."""

from __future__ import annotations

from itertools import accumulate, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import LayoutError
from pcomm.gdn_cp.documents import DocumentsRoute, document_cuts
from pcomm.gdn_cp.specs import GdnSpec
from pcomm.gdn_cp.tokens import Tokens

SPEC = GdnSpec(1, 2, 2, 2)


def loads(cu_seqlens: list[int], cuts: tuple[int, ...]) -> list[int]:
    return [cu_seqlens[b] - cu_seqlens[a] for a, b in pairwise(cuts)]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7), size=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_no_other_cuts_give_the_busiest_rank_less(lengths: list[int], size: int) -> None:
    offsets = list(accumulate(lengths, initial=0))
    cuts = document_cuts(offsets, size)
    assert len(cuts) == size + 1
    assert list(cuts) == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, len(lengths))
    every_way = combinations_with_replacement(range(len(lengths) + 1), size - 1)
    best = min(max(loads(offsets, (0, *way, len(lengths)))) for way in every_way)
    assert max(loads(offsets, cuts)) == best


def test_among_the_best_cuts_the_even_ones_are_taken() -> None:
    # First fit alone would leave the last rank without a document.
    assert loads([0, 4, 8, 12, 16], document_cuts([0, 4, 8, 12, 16], 3)) != [8, 8, 0]
    assert loads([0, 2, 4, 6, 8], document_cuts([0, 2, 4, 6, 8], 4)) == [2, 2, 2, 2]


def test_a_document_far_above_a_share_is_refused_with_the_figures() -> None:
    tokens = Tokens((0, 96, 112, 128), 4, "zigzag")
    with pytest.raises(LayoutError, match="96 of 128 tokens on one rank, 200% above"):
        DocumentsRoute(SPEC, tokens, 0)


def test_imbalance_is_what_the_busiest_rank_has_above_the_average() -> None:
    route = DocumentsRoute(SPEC, Tokens((0, 24, 40), 2, "zigzag"), 1)
    assert route.imbalance == pytest.approx(24 / 20 - 1)
    assert route.cu_seqlens == (0, 16)
    assert route.core_tokens().tolist() == list(range(24, 40))


def test_a_rank_may_be_left_without_documents() -> None:
    tokens = Tokens((0, 12, 24), 3, "zigzag")
    routes = [DocumentsRoute(SPEC, tokens, rank) for rank in range(3)]
    assert sorted(route.core_rows for route in routes) == [0, 12, 12]
    (empty,) = [route for route in routes if not route.core_rows]
    assert empty.cu_seqlens[-1] == 0
