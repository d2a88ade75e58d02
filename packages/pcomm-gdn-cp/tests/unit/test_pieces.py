"""Pieces, their order and their tails, against a walk through the pack token by token."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.gdn_cp.pieces import Pieces
from pcomm.gdn_cp.tokens import Tokens


@st.composite
def packs(draw: st.DrawFn) -> Tokens:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    if draw(st.booleans()):
        chunks = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        lengths = [chunk * 2 * size for chunk in chunks]
        return Tokens(tuple(accumulate(lengths, initial=0)), size, "zigzag")
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    lengths.append(-sum(lengths) % size)
    return Tokens(tuple(accumulate(lengths, initial=0)), size, "contiguous")


def walked(tokens: Tokens) -> list[list[list[int]]]:
    """Of each rank its pieces as lists of tokens: a new one at each border and each jump."""
    sequence = [
        n
        for n in range(tokens.num_sequences)
        for _ in range(tokens.cu_seqlens[n], tokens.cu_seqlens[n + 1])
    ]
    found = []
    for runs in tokens.layout.runs:
        pieces: list[list[int]] = []
        for run in runs:
            for token in range(run.start, run.stop):
                is_new = token == run.start or sequence[token] != sequence[token - 1]
                pieces += [[token]] if is_new else []
                if not is_new:
                    pieces[-1].append(token)
        found.append(pieces)
    return found


@given(tokens=packs(), reach=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_slots_tails_and_halos_are_those_of_a_walk_through_the_pack(
    tokens: Tokens, reach: int
) -> None:
    pieces, expected = Pieces(tokens, reach), walked(tokens)
    end_of = {t: e for s, e in _sequences(tokens) for t in range(s, e)}
    begin_of = {t: s for s, e in _sequences(tokens) for t in range(s, e)}
    slots = [
        (rank, p) for rank, own in enumerate(expected) for p in own if p[-1] + 1 < end_of[p[0]]
    ]
    assert pieces.num_slots == len(slots)
    tails = [token for _, piece in slots for token in piece[-reach:]]
    for rank, own in enumerate(expected):
        table = pieces.of_rank(rank)
        assert [
            list(range(*r)) for r in zip(table.start.tolist(), table.stop.tolist(), strict=True)
        ] == own
        assert pieces.slot_counts[rank] == sum(r == rank for r, _ in slots)
        assert [own[i] for i in pieces.own_slots(rank).tolist()] == [
            p for r, p in slots if r == rank
        ]

        before = [
            sorted(
                (p[0], slot) for slot, (_, p) in enumerate(slots) if begin_of[q[0]] <= p[0] < q[0]
            )
            for q in own
        ]
        assert pieces.num_before(rank).tolist() == [len(found) for found in before]
        for depth in range(max(map(len, before), default=0)):
            wanted = [found[depth][1] for found in before if len(found) > depth]
            assert pieces.slot_before(rank, depth).tolist() == wanted

        mine = tokens.of_rank(rank).tolist()
        sent = [mine[row] for row in pieces.tail_rows(rank).tolist()]
        assert sent == [token for r, piece in slots if r == rank for token in piece[-reach:]]
        assert pieces.tail_counts[rank] == len(sent)
        wanted_tokens = [
            token if token >= begin_of[q[0]] else None
            for q in own
            for token in range(q[0] - reach, q[0])
        ]
        rows = [*tails, None]
        assert [rows[row] for row in pieces.halo_rows(rank).flatten().tolist()] == wanted_tokens


def _sequences(tokens: Tokens) -> list[tuple[int, int]]:
    return list(pairwise(tokens.cu_seqlens))


def test_one_sequence_over_all_ranks() -> None:
    pieces = Pieces(Tokens((0, 12), 3, "contiguous"), 3)
    assert pieces.slot_counts == (1, 1, 0)
    assert pieces.num_before(2).tolist() == [2]
    assert torch.equal(pieces.halo_rows(1), torch.tensor([[0, 1, 2]]))


def test_whole_sequences_on_every_rank_have_nothing_to_say() -> None:
    pieces = Pieces(Tokens((0, 2, 4, 8), 2, "contiguous"), 3)
    assert pieces.num_slots == 0
    assert pieces.tail_counts == (0, 0)
