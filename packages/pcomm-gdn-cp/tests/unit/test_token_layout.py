"""Token layouts against a list of owners that is written token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.layout import Layout
from pcomm.gdn_cp.token_layout import LayoutName, TokenLayout

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def layout_of(cu_seqlens: Sequence[int], size: int, name: LayoutName) -> Layout:
    return TokenLayout(tuple(cu_seqlens), size, name).layout


zigzag, contiguous = (partial(layout_of, name=name) for name in ("zigzag", "contiguous"))


def owners_zigzag(lengths: list[int], size: int) -> list[int]:
    """Who has each token: walk through every sequence chunk by chunk, down and up the ranks."""
    owners = []
    for length in lengths:
        for rank in [*range(size), *reversed(range(size))]:
            owners += [rank] * (length // (2 * size))
    return owners


def held(owners: list[int], rank: int) -> list[int]:
    return [token for token, owner in enumerate(owners) if owner == rank]


@given(chunks=st.lists(st.integers(0, 5), max_size=12), size=SIZES)
def test_zigzag_gives_each_rank_a_chunk_from_the_front_and_one_from_the_back(
    chunks: list[int], size: int
) -> None:
    lengths = [chunk * 2 * size for chunk in chunks]
    cu_seqlens = list(accumulate(lengths, initial=0))
    layout, owners = zigzag(cu_seqlens, size), owners_zigzag(lengths, size)
    assert [layout.positions(rank) for rank in range(size)] == [
        held(owners, r) for r in range(size)
    ]
    assert layout.is_partition
    assert len(set(layout.sizes)) == 1


@given(lengths=st.lists(st.integers(0, 9), max_size=12), size=SIZES)
@settings(max_examples=50)
def test_contiguous_gives_each_rank_the_next_stretch(lengths: list[int], size: int) -> None:
    lengths = [*lengths, -sum(lengths) % size]
    total = sum(lengths)
    layout = contiguous(list(accumulate(lengths, initial=0)), size)
    owners = [token * size // total for token in range(total)]
    assert [layout.positions(rank) for rank in range(size)] == [
        held(owners, r) for r in range(size)
    ]


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@given(chunks=st.lists(st.integers(0, 3), max_size=8), size=SIZES)
@settings(max_examples=40)
def test_local_offsets_count_what_a_rank_holds_of_each_sequence(
    name: str, chunks: list[int], size: int
) -> None:
    cu_seqlens = tuple(accumulate((c * 2 * size for c in chunks), initial=0))
    tokens = TokenLayout(cu_seqlens, size, name)  # type: ignore[arg-type]
    for rank in range(size):
        mine = tokens.layout.positions(rank)
        counts = [sum(a <= token < b for token in mine) for a, b in pairwise(cu_seqlens)]
        assert tokens.local_cu_seqlens(rank) == tuple(accumulate(counts, initial=0))
        assert tokens.of_rank(rank).tolist() == mine


@pytest.mark.parametrize(
    ("build", "words"),
    [
        # Accepted elsewhere, because 12 is a multiple of 4; the chunks then overlap.
        (lambda: zigzag((0, 12, 24), 4), "sequence 0 has 12 tokens; so 2 in all .* multiple of 8"),
        (lambda: zigzag((0, 16, 22, 32), 2), "sequence 1 has 6 tokens; so 2 in all"),
        (lambda: zigzag((0, 8, 4), 2), r"\[8, 4\] from place 1 of 3"),
        (lambda: zigzag((4, 8), 2), r"\[4, 8\] from place 0"),
        (lambda: zigzag((), 2), "from place 0 of 0"),
        (lambda: zigzag((0, 8), 0), "0 ranks"),
        (lambda: contiguous((0, 5, 9), 2), "9 tokens over 2 ranks: a remainder of 1"),
        (lambda: contiguous((0, 5, 3), 2), r"\[5, 3\]"),
        (lambda: contiguous((0, 4.0), 2), r"\[0, 4.0\]"),
    ],
)
def test_packs_that_do_not_fit_are_refused(build: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        build()  # type: ignore[operator]
    with pytest.raises(ConfigError, match="Did you mean 'zigzag'"):
        TokenLayout((0, 8), 2, "zig-zag")  # type: ignore[arg-type]
    # One rank takes any lengths.
    assert zigzag((0, 1, 4, 9), 1) == contiguous((0, 1, 4, 9), 1)
