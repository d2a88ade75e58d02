"""How a pack lies on the ranks in pieces, and which pieces come before which: integers only.

A piece that does not end its sequence has a *slot*: its number among all such pieces, rank after
rank, which is the order in which a gather delivers what belongs to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pcomm.gdn_cp.tokens import Fragment, Tokens

__all__ = ["Pieces"]


@dataclass(frozen=True)
class Pieces:
    """All pieces of all ranks.

    Args:
        tokens: The pack and its layout.
        reach: How many tokens before itself a convolution looks back: its width less one.
    """

    tokens: Tokens
    reach: int

    @cached_property
    def of_ranks(self) -> tuple[tuple[Fragment, ...], ...]:
        """Of each rank its pieces, as they lie there."""
        return tuple(self.tokens.fragments(rank) for rank in range(self.tokens.size))

    @cached_property
    def slot_counts(self) -> tuple[int, ...]:
        """Of each rank how many of its pieces go on elsewhere."""
        return tuple(len(self.slots_of(rank)) for rank in range(self.tokens.size))

    @property
    def num_slots(self) -> int:
        """Pieces of all ranks that go on elsewhere."""
        return sum(self.slot_counts)

    @cached_property
    def tail_counts(self) -> tuple[int, ...]:
        """Of each rank how many of its tokens a convolution elsewhere looks back to."""
        return tuple(len(self.tail_rows(rank)) for rank in range(self.tokens.size))

    def slots_of(self, rank: int) -> list[int]:
        """Which pieces of `rank` go on elsewhere, by their places there."""
        ends = self.tokens.cu_seqlens
        pieces = self.of_ranks[rank]
        return [i for i, piece in enumerate(pieces) if piece.stop < ends[piece.sequence + 1]]

    def slots_before(self, rank: int) -> list[list[int]]:
        """For each piece of `rank`, the slots of its sequence before it, earliest first."""
        return [
            [slot for start, slot in self._chains.get(piece.sequence, []) if start < piece.start]
            for piece in self.of_ranks[rank]
        ]

    def tail_rows(self, rank: int) -> list[int]:
        """The tokens of `rank` that others look back to, by their rows there."""
        rows = []
        for first, piece in self._slots_with_rows(rank):
            length = piece.stop - piece.start
            rows += range(first + max(length - self.reach, 0), first + length)
        return rows

    def halo_rows(self, rank: int) -> list[int]:
        """For each piece of `rank` the `reach` tokens before it, as rows of the gathered tails.

        A token before the start of the sequence is the row after the last.
        """
        nothing = sum(self.tail_counts)
        rows = []
        for piece in self.of_ranks[rank]:
            begin = self.tokens.cu_seqlens[piece.sequence]
            for token in range(piece.start - self.reach, piece.start):
                rows.append(self._gathered_row[token] if token >= begin else nothing)
        return rows

    @cached_property
    def _chains(self) -> dict[int, list[tuple[int, int]]]:
        """Of each sequence that is on several pieces: start and slot of those that go on."""
        chains: dict[int, list[tuple[int, int]]] = {}
        slot = 0
        for rank, pieces in enumerate(self.of_ranks):
            for place in self.slots_of(rank):
                chains.setdefault(pieces[place].sequence, []).append((pieces[place].start, slot))
                slot += 1
        return {sequence: sorted(chain) for sequence, chain in chains.items()}

    @cached_property
    def _gathered_row(self) -> dict[int, int]:
        """The row of each token among the gathered tails."""
        tokens: list[int] = []
        for rank in range(self.tokens.size):
            for _, piece in self._slots_with_rows(rank):
                tokens += range(max(piece.start, piece.stop - self.reach), piece.stop)
        return {token: row for row, token in enumerate(tokens)}

    def _slots_with_rows(self, rank: int) -> list[tuple[int, Fragment]]:
        pieces: Sequence[Fragment] = self.of_ranks[rank]
        firsts = list(accumulate((p.stop - p.start for p in pieces), initial=0))
        return [(firsts[place], pieces[place]) for place in self.slots_of(rank)]
