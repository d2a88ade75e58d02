"""Segments, their order and their tails, against a walk through the pack token by token."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.layout import Layout
from pcomm.gdn_cp.sequence_segments import SequenceSegments
from pcomm.gdn_cp.token_layout import TokenLayout


@st.composite
def packs(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    if draw(st.booleans()):
        chunks = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        cu_seqlens = tuple(accumulate((c * 2 * size for c in chunks), initial=0))
        return cu_seqlens, TokenLayout(cu_seqlens, size, "zigzag").layout
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    cu_seqlens = tuple(accumulate(lengths, initial=0))
    # Uneven stretches, some of them empty.
    cuts = sorted(
        draw(st.lists(st.integers(0, cu_seqlens[-1]), min_size=size - 1, max_size=size - 1))
    )
    return cu_seqlens, Layout.uneven([b - a for a, b in pairwise((0, *cuts, cu_seqlens[-1]))])


def walked(cu_seqlens: tuple[int, ...], layout: Layout) -> list[list[list[int]]]:
    """Of each rank its segments as lists of tokens: a new one at each boundary and each jump."""
    sequence = [n for n, (a, b) in enumerate(pairwise(cu_seqlens)) for _ in range(a, b)]
    found = []
    for runs in layout.runs:
        segments: list[list[int]] = []
        for run in runs:
            for token in range(run.start, run.stop):
                is_new = token == run.start or sequence[token] != sequence[token - 1]
                segments += [[token]] if is_new else []
                if not is_new:
                    segments[-1].append(token)
        found.append(segments)
    return found


@given(pack=packs(), reach=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_slots_tails_and_halos_are_those_of_a_walk_through_the_pack(
    pack: tuple[tuple[int, ...], Layout], reach: int
) -> None:
    cu_seqlens, layout = pack
    segments, expected = SequenceSegments(cu_seqlens, layout, reach), walked(cu_seqlens, layout)
    sequences = list(enumerate(pairwise(cu_seqlens)))
    end_of = {t: e for _, (s, e) in sequences for t in range(s, e)}
    begin_of = {t: s for _, (s, e) in sequences for t in range(s, e)}
    number_of = {t: n for n, (s, e) in sequences for t in range(s, e)}
    slots = [
        (rank, p) for rank, own in enumerate(expected) for p in own if p[-1] + 1 < end_of[p[0]]
    ]
    ends = [p for own in expected for p in own if p[-1] + 1 == end_of[p[0]]]
    assert segments.num_slots == len(slots)
    tails = [
        token
        for _, segment in slots
        for token in segment[len(segment) - min(reach, len(segment)) :]
    ]
    for rank, own in enumerate(expected):
        table = segments.of_rank(rank)
        assert [
            list(range(*r)) for r in zip(table.start.tolist(), table.stop.tolist(), strict=True)
        ] == own
        assert table.sequence.tolist() == [number_of[p[0]] for p in own]
        assert segments.slot_counts[rank] == sum(r == rank for r, _ in slots)
        assert [own[i] for i in segments.own_slots(rank).tolist()] == [
            p for r, p in slots if r == rank
        ]
        assert [own[i] for i in segments.own_ends(rank).tolist()] == [p for p in own if p in ends]
        assert segments.end_counts[rank] == sum(p in ends for p in own)

        before = [
            sorted(
                (p[0], slot) for slot, (_, p) in enumerate(slots) if begin_of[q[0]] <= p[0] < q[0]
            )
            for q in own
        ]
        assert segments.num_before(rank).tolist() == [len(found) for found in before]
        for depth in range(max(map(len, before), default=0)):
            wanted = [found[depth][1] for found in before if len(found) > depth]
            assert segments.slot_before(rank, depth).tolist() == wanted

        mine = layout.positions(rank)
        sent = [mine[row] for row in segments.tail_rows(rank).tolist()]
        assert sent == [
            token
            for r, segment in slots
            if r == rank
            for token in segment[len(segment) - min(reach, len(segment)) :]
        ]
        assert segments.tail_counts[rank] == len(sent)
        # A token before its sequence by how far before, and which sequence that is.
        wanted_tokens = [
            token if token >= begin_of[q[0]] else (number_of[q[0]], begin_of[q[0]] - token)
            for q in own
            for token in range(q[0] - reach, q[0])
        ]
        rows = [*tails, None]
        assert [
            rows[row] for row in segments.halo_rows(rank, is_continued=False).flatten().tolist()
        ] == [None if isinstance(token, tuple) else token for token in wanted_tokens]
        continued = [*tails, *((n, reach - i) for n, _ in sequences for i in range(reach))]
        assert [
            continued[row] for row in segments.halo_rows(rank, is_continued=True).flatten().tolist()
        ] == wanted_tokens

    last = {number_of[p[0]]: p for p in ends}
    assert [[*ends, None][row] for row in segments.end_rows(is_continued=False).tolist()] == [
        last.get(n) for n, _ in sequences
    ]
    assert [
        [*ends, *(n for n, _ in sequences)][row]
        for row in segments.end_rows(is_continued=True).tolist()
    ] == [last.get(n, n) for n, _ in sequences]
