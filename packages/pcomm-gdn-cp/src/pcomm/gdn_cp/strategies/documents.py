"""Strategy `docs`: each rank gets a stretch of the pack as hidden states and runs the layer on it.

Hidden states are narrower than what is projected from them, and heads need not divide. What has to
be found is where to cut: at borders of documents, where that gives all ranks about the same number
of tokens. Where a document is too long for that it is cut as well; it is a *straddler* then, and
its segments hand over states as with strategy `state`. Softmax attention has no state to hand over,
so it gets whole documents only.
"""

# t tokens of this rank between layers, D model dim

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.exchange.exchange import Exchange
from pcomm.core.exchange.positions import layout_edges, run_ranks
from pcomm.core.layout import Layout
from pcomm.gdn_cp.pack_offsets import PackOffsets
from pcomm.gdn_cp.sequence_segments import SequenceSegments
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.strategies.boundary_states import BoundaryStates
from pcomm.gdn_cp.strategies.head_share import Traffic
from pcomm.gdn_cp.strategies.state import StatePassing
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.token_layout import TokenLayout

__all__ = ["TOLERATED_IMBALANCE", "DocumentSplit", "DocumentsStrategy", "document_cuts"]


# By how much the busiest rank may have more than its share for the sake of whole documents: above
# it a document is cut, and `auto` takes another strategy where none can be. A first guess; no
# measurement stands behind it yet.
TOLERATED_IMBALANCE = 0.1
# A rank with more than twice its share: the others would wait for it longer than the exchange of
# heads takes, and the documents in question are longer than a share.
MAX_IMBALANCE = 1.0


class DocumentsStrategy(Strategy):
    """A stretch of the pack on each rank, with all heads: whole documents as far as possible.

    Raises:
        LayoutError: The mixer needs whole documents, and however they are dealt out, a rank has
            more than twice its share.
    """

    name = "docs"

    def __init__(self, spec: Spec, tokens: TokenLayout, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        if self.imbalance > MAX_IMBALANCE:
            counts = self.documents.layout.sizes
            raise LayoutError(
                f"make_plan: strategy 'docs' for {tokens.num_sequences} sequences over "
                f"{tokens.size} ranks and {spec}",
                found=f"at best {max(counts)} of {tokens.num_tokens} tokens on one rank, "
                f"{self.imbalance:.0%} above the average",
                why="A mixer without a state needs whole documents, and one that is longer than a "
                f"share holds all up; above {MAX_IMBALANCE:.0%} this strategy is refused.",
                fix="Use strategy 'heads' for it with packs of such documents, or 'auto'.",
            )

    @cached_property
    def documents(self) -> DocumentSplit:
        """How the documents are dealt out; in the same way for all mixers unless one is cut."""
        documents = self.tokens.derived(DocumentSplit.of, False)
        if self.spec.state is not None or not documents.num_cut_documents:
            return documents
        return self.tokens.derived(DocumentSplit.of, True)

    @cached_property
    def segments(self) -> SequenceSegments:
        """The documents, and segments of documents, on all ranks."""
        reach = self.spec.convolution.reach if self.spec.convolution is not None else 0
        return self.tokens.derived(_segments, self.documents.are_whole, reach)

    @cached_property
    def boundary_states(self) -> BoundaryStates:
        """What segments of documents take from those before them."""
        if self.spec.state is not None:
            return StatePassing(self.share, self.tokens, self.rank, self.segments)
        return BoundaryStates(self.share, self.tokens, self.rank)

    @property
    def num_cut_documents(self) -> int:
        """Documents that are cut."""
        return self.documents.num_cut_documents

    @property
    def cu_seqlens(self) -> PackOffsets:
        """Offsets of this rank's documents and segments, without empty ones."""
        return self.segments.offsets_of(self.rank)

    @property
    def imbalance(self) -> float:
        """By how much the busiest rank has more tokens than the average."""
        return self.documents.imbalance

    @property
    def core_rows(self) -> int:
        """Tokens of this rank's documents."""
        return self.documents.layout.sizes[self.rank]

    @property
    def layer_rows(self) -> int:
        """The same: the whole layer runs on them."""
        return self.core_rows

    def core_tokens(self) -> Tensor:
        """The tokens of this rank's documents."""
        return torch.arange(*self.documents.cuts[self.rank : self.rank + 2])

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Hidden states of the tokens that move, there and back, and what straddlers hand over."""
        inner = Traffic()
        if isinstance(self.boundary_states, StatePassing):
            inner = self.boundary_states.traffic(rank, element_bytes)
        if self.documents.are_in_place:
            return inner
        moved = self.documents.moved_rows
        leaving = int(moved[rank].sum() - moved[rank, rank])
        coming = int(moved[:, rank].sum() - moved[rank, rank])
        sent = (leaving + coming) * (hidden_dim or 0) * element_bytes
        return Traffic(
            ("all_to_all", *inner.forward, "all_to_all"),
            ("all_to_all", *inner.backward, "all_to_all"),
            sent + inner.forward_bytes,
            sent + inner.backward_bytes,
        )

    def enter(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """Hidden states of this rank's documents, one all-to-all unless they are here."""
        self.check_rows("Plan.enter", hidden_tD, self.tokens.local_tokens)
        if self.documents.are_in_place:
            return hidden_tD
        return self.documents.exchange.apply(hidden_tD, collectives)

    def leave(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """Hidden states of this rank's tokens, what `enter` undoes."""
        self.check_rows("Plan.leave", hidden_tD, self.layer_rows)
        if self.documents.are_in_place:
            return hidden_tD
        return self.documents.exchange.inverse.apply(hidden_tD, collectives)

    def prepare(self, device: torch.device) -> None:
        """The rows of the exchange, both ways."""
        if not self.documents.are_in_place:
            self.documents.exchange.prepare(self.rank, device)


def _segments(tokens: TokenLayout, are_whole: bool, reach: int) -> SequenceSegments:
    return SequenceSegments(
        tokens.cu_seqlens, tokens.derived(DocumentSplit.of, are_whole).layout, reach
    )


@dataclass(frozen=True)
class DocumentSplit:
    """How the documents of a pack are dealt out; the same for every mixer that allows as much.

    Args:
        cu_seqlens: Offsets of the documents.
        source: The tokens of each rank between layers.
        are_whole: True if no document may be cut.
    """

    cu_seqlens: tuple[int, ...]
    source: Layout
    are_whole: bool

    @classmethod
    def of(cls, tokens: TokenLayout, are_whole: bool) -> DocumentSplit:
        """Those of a pack, which keeps them by `derived`."""
        return cls(tokens.cu_seqlens, tokens.layout, are_whole)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The tokens where the stretches of the ranks begin, and where the last one ends."""
        limit = None if self.are_whole else TOLERATED_IMBALANCE
        return document_cuts(self.cu_seqlens, self.source.size, limit=limit)

    @cached_property
    def num_cut_documents(self) -> int:
        """Documents that are cut."""
        offsets = self.cu_seqlens
        inside = set(self.cuts).difference(offsets)
        return len({bisect_right(offsets, cut) for cut in inside})

    @cached_property
    def layout(self) -> Layout:
        """The stretch of the pack on each rank."""
        return Layout.uneven([b - a for a, b in pairwise(self.cuts)])

    @cached_property
    def are_in_place(self) -> bool:
        """Whether every rank has its documents already, in their order: nothing has to move."""
        return self.source == self.layout

    @cached_property
    def exchange(self) -> Exchange:
        """From the tokens between layers to documents."""
        return Exchange({0: self.source}, {0: self.layout})

    @cached_property
    def imbalance(self) -> float:
        """By how much the busiest rank has more tokens than the average."""
        total, size = self.source.length, self.source.size
        # One rounding, so that what is just within a limit stays within it.
        return (max(self.layout.sizes) * size - total) / total if total else 0.0

    @cached_property
    def moved_rows(self) -> Tensor:
        """`[ranks, ranks]`: how many tokens go from one to the other."""
        # From runs, which are far fewer than tokens: of each rank, how many lie before each cut.
        layout, beyond = self.source, self.source.length + 1
        begin_R, end_R = layout_edges(layout).T.contiguous()
        rank_R = run_ranks(layout)
        key_R, order_R = (rank_R * beyond + begin_R).sort()
        begin_R, end_R = begin_R[order_R], end_R[order_R]
        total_R1 = torch.nn.functional.pad((end_R - begin_R).cumsum(0), (1, 0))
        cuts = torch.tensor(self.cuts)
        place = torch.searchsorted(key_R, torch.arange(layout.size)[:, None] * beyond + cuts)
        # The last run that begins before the cut may go on behind it.
        last = (place - 1).clamp(min=0)
        over = (end_R[last] - cuts).clamp(min=0) if len(key_R) else torch.zeros_like(place)
        before = total_R1[place] - over * (place > place[:, :1])
        return before.diff(dim=1)


def document_cuts(
    cu_seqlens: Sequence[int], size: int, *, limit: float | None = TOLERATED_IMBALANCE
) -> tuple[int, ...]:
    """Where each rank's range of the pack begins, and where the last one ends: `size + 1` tokens.

    With the fewest cuts inside documents that leave no rank more than `limit` above the average,
    or than that rounded up; two cuts at one place, with nothing between them, are one. Under as
    many cuts the busiest rank has the least that is possible. Among those that reach it, cuts at
    boundaries are taken, and those nearest to equal shares, one after another.

    Args:
        cu_seqlens: Offsets of the documents.
        size: Number of ranks.
        limit: 0.1 for 10 % above the average; None to keep all documents whole.
    """
    boundaries = sorted(set(cu_seqlens))
    total = boundaries[-1]
    low = -(-total // size)
    high = total if limit is None else max(low, int(total * (1 + limit)) // size)
    num_cuts = len(_farthest(boundaries, size, high)) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_farthest(boundaries, size, middle, num_cuts)) - 1 <= num_cuts:
            high = middle
        else:
            low = middle + 1
    mirrored = [total - boundary for boundary in reversed(boundaries)]
    back = _farthest(mirrored, size, high)

    def earliest(rank: int, num_cuts: int) -> int:
        """Where `rank` may start if from there on so many cuts are left, its own not counted."""
        return total - back[num_cuts][size - rank - 1] - high

    cuts, left = [0], num_cuts
    for rank in range(1, size):
        wanted, before = rank * total / size, cuts[-1]
        last = min(before + high, total)
        at = _nearest(boundaries, wanted, max(before, earliest(rank, left)), last)
        if at is None:
            # A rank gets nothing where that saves a cut.
            at = before
            if left and (first := max(before, earliest(rank, left - 1))) <= last:
                at, left = min(max(round(wanted), first), last), left - 1
        cuts.append(at)
    return (*cuts, total)


def _farthest(
    boundaries: list[int], size: int, most: int, num_cuts: int | None = None
) -> list[list[int]]:
    """How far the first ranks reach with at most `most` tokens each, `[cuts, ranks]`.

    One line for each number of cuts between boundaries, up to that with which `size` ranks reach
    the end; at most to one line above `num_cuts`. A longer prefix dominates a shorter one: every
    later cut stays available.
    """
    table: list[list[int]] = []
    while not table or (table[-1][-1] < boundaries[-1] and len(table) - 2 != num_cuts):
        line = [0]
        for rank in range(size):
            reach = boundaries[bisect_right(boundaries, line[-1] + most) - 1]
            if table:
                reach = max(reach, min(table[-1][rank] + most, boundaries[-1]))
            line.append(max(reach, line[-1]))
        table.append(line)
    return table


def _nearest(boundaries: list[int], wanted: float, first: int, last: int) -> int | None:
    """The boundary from `first` to `last` nearest to `wanted`, the earlier one of two."""
    low, high = bisect_left(boundaries, first), bisect_right(boundaries, last) - 1
    if low > high:
        return None
    after = min(max(bisect_left(boundaries, wanted), low), high)
    before = max(after - 1, low)
    return min(boundaries[before], boundaries[after], key=lambda boundary: abs(boundary - wanted))
