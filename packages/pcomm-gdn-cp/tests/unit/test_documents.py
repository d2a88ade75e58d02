"""Where documents are cut, against trying every way to cut them."""

from __future__ import annotations

from itertools import accumulate, combinations_with_replacement, pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import LayoutError
from pcomm.gdn_cp import AttentionSpec, GdnSpec
from pcomm.gdn_cp.strategies.documents import DocumentSplit, DocumentsStrategy, document_cuts
from pcomm.gdn_cp.token_layout import TokenLayout

SPEC, ATTENTION = GdnSpec(1, 2, 2, 2), AttentionSpec(2, 1, 4)


def loads(cuts: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in pairwise(cuts)]


def inside(offsets: list[int], cuts: tuple[int, ...]) -> int:
    """Places inside documents that are cut."""
    return len(set(cuts) - set(offsets))


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7), size=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_other_cuts_at_borders_give_the_busiest_rank_less(lengths: list[int], size: int) -> None:
    offsets = list(accumulate(lengths, initial=0))
    cuts = document_cuts(offsets, size, limit=None)
    assert len(cuts) == size + 1
    assert list(cuts) == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, offsets[-1])
    assert inside(offsets, cuts) == 0
    every_way = combinations_with_replacement(offsets, size - 1)
    best = min(max(loads((0, *way, offsets[-1]))) for way in every_way)
    assert max(loads(cuts)) == best


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    size=st.integers(1, 4),
    tenths=st.integers(0, 10),
)
@settings(max_examples=60, deadline=None)
def test_no_fewer_cuts_inside_documents_would_do(
    lengths: list[int], size: int, tenths: int
) -> None:
    offsets = list(accumulate(lengths, initial=0))
    total = offsets[-1]
    cuts = document_cuts(offsets, size, limit=tenths / 10)
    assert len(cuts) == size + 1
    assert list(cuts) == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, total)
    # In whole numbers: at most so much above the average, or the average rounded up.
    most = max(-(-total // size), total * (10 + tenths) // (10 * size))
    assert max(loads(cuts)) <= most
    every_way = [
        (0, *way, total) for way in combinations_with_replacement(range(total + 1), size - 1)
    ]
    fewest, least = min(
        (inside(offsets, way), max(loads(way))) for way in every_way if max(loads(way)) <= most
    )
    assert inside(offsets, cuts) == fewest
    assert max(loads(cuts)) == least


@given(
    lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=40),
    size=st.sampled_from([1, 2, 3, 4, 8, 16]),
)
@settings(max_examples=40, deadline=None)
def test_long_packs_stay_within_the_limit(lengths: list[int], size: int) -> None:
    lengths.append(-sum(lengths) % size)
    offsets = tuple(accumulate(lengths, initial=0))
    documents = DocumentSplit.of(TokenLayout(offsets, size, "contiguous"), are_whole=False)
    assert documents.imbalance <= 0.1
    assert sum(documents.layout.sizes) == offsets[-1]
    num_cuts = inside(list(offsets), documents.cuts)
    assert documents.num_cut_documents <= num_cuts <= size - 1
    # A cut of a document pays only where whole documents would be too uneven.
    whole = DocumentSplit.of(TokenLayout(offsets, size, "contiguous"), are_whole=True)
    assert (num_cuts == 0) == (whole.imbalance <= 0.1)


@given(
    chunks=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    size=st.sampled_from([1, 2, 3, 4, 8]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    are_whole=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_moved_rows_are_those_of_a_walk_through_the_pack(
    chunks: list[int], size: int, layout: Literal["zigzag", "contiguous"], are_whole: bool
) -> None:
    offsets = tuple(accumulate((c * 2 * size for c in chunks), initial=0))
    tokens = TokenLayout(offsets, size, layout)
    documents = DocumentSplit.of(tokens, are_whole)
    source, target = (
        [set(one.positions(rank)) for rank in range(size)]
        for one in (tokens.layout, documents.layout)
    )
    assert documents.moved_rows.tolist() == [[len(s & t) for t in target] for s in source]


@pytest.mark.parametrize(
    ("lengths", "size", "expected", "num_cut_documents"),
    [
        # One document on all ranks: equal shares; and more ranks than documents.
        ((12,), 3, (0, 4, 8, 12), 1),
        ((8, 8), 4, (0, 4, 8, 12, 16), 2),
        # Among the best cuts the even ones are taken.
        ((2, 2, 2, 2), 4, (0, 2, 4, 6, 8), 0),
        # 10 % more on one rank is no reason to cut, 25 % is.
        ((11, 9), 2, (0, 11, 20), 0),
        ((24, 16, 24), 2, (0, 32, 64), 1),
        ((0, 0), 2, (0, 0, 0), 0),
    ],
)
def test_cuts_of_a_few_packs(
    lengths: tuple[int, ...], size: int, expected: tuple[int, ...], num_cut_documents: int
) -> None:
    offsets = tuple(accumulate(lengths, initial=0))
    assert document_cuts(offsets, size) == expected
    documents = DocumentSplit.of(TokenLayout(offsets, size, "contiguous"), are_whole=False)
    assert documents.num_cut_documents == num_cut_documents


def test_what_a_rank_has_of_whole_documents() -> None:
    second = DocumentsStrategy(ATTENTION, TokenLayout((0, 24, 40), 2, "zigzag"), 1)
    assert second.imbalance == pytest.approx(24 / 20 - 1)
    assert second.cu_seqlens == (0, 16)
    assert second.core_tokens().tolist() == list(range(24, 40))
    # A rank may be left without any.
    tokens = TokenLayout((0, 12, 24), 3, "zigzag")
    strategies = [DocumentsStrategy(ATTENTION, tokens, rank) for rank in range(3)]
    assert sorted(strategy.cu_seqlens[-1] for strategy in strategies) == [0, 12, 12]


def test_mixers_share_the_documents_unless_one_is_cut() -> None:
    even = TokenLayout((0, 12, 24), 2, "zigzag")
    assert (
        DocumentsStrategy(SPEC, even, 0).documents
        is DocumentsStrategy(ATTENTION, even, 0).documents
    )
    cut = TokenLayout((0, 8, 32), 2, "zigzag")
    one, other = (DocumentsStrategy(spec, cut, 1) for spec in (SPEC, ATTENTION))
    assert (one.num_cut_documents, other.num_cut_documents) == (1, 0)
    assert one.boundary_states.needs_summary
    assert (one.cu_seqlens, other.cu_seqlens) == ((0, 16), (0, 24))


@pytest.mark.parametrize(("longest", "is_refused"), [(63, False), (64, False), (65, True)])
def test_whole_documents_are_refused_above_twice_a_share(longest: int, is_refused: bool) -> None:
    tokens = TokenLayout((0, longest, 96, 112, 128), 4, "contiguous")
    if is_refused:
        with pytest.raises(LayoutError, match=r"65 of 128 tokens on one rank, 103% above"):
            DocumentsStrategy(ATTENTION, tokens, 0)
    else:
        assert DocumentsStrategy(ATTENTION, tokens, 0).imbalance == pytest.approx(longest / 32 - 1)
    # With a state it is cut.
    assert DocumentsStrategy(SPEC, tokens, 0).imbalance <= 0.1
