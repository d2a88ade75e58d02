"""Mode `docs`: each rank gets whole documents as hidden states, runs the layer, sends the output.

Hidden states are narrower than what is projected from them, no state crosses ranks, and heads need
not divide. What has to be found is where to cut: at borders of documents, so that the busiest rank
has as few tokens as possible.
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
from pcomm.core.exchange import Exchange
from pcomm.core.layout import Layout
from pcomm.gdn_cp.route import Route, Traffic
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.tokens import Tokens

__all__ = ["Documents", "DocumentsRoute", "document_cuts"]

# A rank with more than twice its share: the others would wait for it longer than the exchange of
# heads takes, and the documents in question are longer than a share.
MAX_IMBALANCE = 1.0


def document_cuts(cu_seqlens: Sequence[int], size: int) -> tuple[int, ...]:
    """The number of documents before each rank's, and of all: `size + 1` places in `cu_seqlens`.

    The largest number of tokens on a rank is the least that whole, consecutive documents allow.
    Among the cuts that reach it, those nearest to equal shares are taken, one after another.
    """
    offsets, last = list(cu_seqlens), len(cu_seqlens) - 1
    total = offsets[-1]
    longest = max((b - a for a, b in pairwise(offsets)), default=0)
    low, high = max(longest, -(-total // size)), total
    while low < high:
        middle = (low + high) // 2
        if _first_fit(offsets, size, middle)[-1] == last:
            high = middle
        else:
            low = middle + 1
    latest = _first_fit(offsets, size, low)
    # From the other end: the earliest place of each cut from which the rest still fits.
    mirrored = [total - offset for offset in reversed(offsets)]
    earliest = [last - place for place in reversed(_first_fit(mirrored, size, low))]
    cuts = [0]
    for rank in range(1, size):
        fits = bisect_right(offsets, offsets[cuts[-1]] + low) - 1
        first, stop = max(earliest[rank], cuts[-1]), min(latest[rank], fits)
        cuts.append(min(max(_nearest(offsets, rank * total / size), first), stop))
    return (*cuts, last)


def _nearest(offsets: list[int], wanted: float) -> int:
    """The place of the offset nearest to `wanted`, the earlier one of two."""
    after = bisect_left(offsets, wanted)
    if after == 0 or (
        after < len(offsets) and offsets[after] - wanted < wanted - offsets[after - 1]
    ):
        return after
    return after - 1


def _first_fit(offsets: list[int], size: int, most: int) -> list[int]:
    """Cuts that give each rank as many documents as `most` tokens hold."""
    cuts = [0]
    for _ in range(size):
        cuts.append(bisect_right(offsets, offsets[cuts[-1]] + most) - 1)
    return cuts


@dataclass(frozen=True)
class Documents:
    """How the documents of a pack are dealt out; the same for every mixer.

    Args:
        tokens: The pack and its layout between layers.
    """

    tokens: Tokens

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Places in `cu_seqlens` where the ranks' documents begin, and where the last ends."""
        return document_cuts(self.tokens.cu_seqlens, self.tokens.size)

    @cached_property
    def layout(self) -> Layout:
        """The tokens of each rank's documents."""
        at = [self.tokens.cu_seqlens[cut] for cut in self.cuts]
        return Layout.uneven([b - a for a, b in pairwise(at)])

    @cached_property
    def exchange(self) -> Exchange:
        """From the tokens between layers to whole documents."""
        return Exchange({0: self.tokens.layout}, {0: self.layout})

    @cached_property
    def imbalance(self) -> float:
        """By how much the busiest rank has more tokens than the average."""
        average = self.tokens.num_tokens / self.tokens.size
        return max(self.layout.sizes) / average - 1 if average else 0.0

    @cached_property
    def moved_rows(self) -> Tensor:
        """`[ranks, ranks]`: how many tokens go from one to the other."""
        size = self.tokens.size
        source, target = (
            torch.arange(size).repeat_interleave(torch.tensor(layout.sizes))
            for layout in (self.tokens.layout, self.layout)
        )
        # `target` is in the order of the pack, `source` in the order of the ranks' tensors.
        pairs = source * size + target[self.tokens.order]
        return pairs.bincount(minlength=size * size).view(size, size)


class DocumentsRoute(Route):
    """Whole documents on each rank, with all heads.

    Raises:
        LayoutError: However the documents are dealt out, a rank has more than twice its share.
    """

    mode = "docs"

    def __init__(self, spec: Spec, tokens: Tokens, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        if self.imbalance > MAX_IMBALANCE:
            counts = self.documents.layout.sizes
            raise LayoutError(
                f"make_plan: mode 'docs' for {tokens.num_sequences} sequences over "
                f"{tokens.size} ranks",
                found=f"at best {max(counts)} of {tokens.num_tokens} tokens on one rank, "
                f"{self.imbalance:.0%} above the average",
                why="A document is not cut, and one that is longer than a share holds all up; "
                f"above {MAX_IMBALANCE:.0%} this mode is refused.",
                fix="Use mode 'heads' or 'state' for packs with such documents, or 'auto'.",
            )

    @property
    def documents(self) -> Documents:
        """How the documents are dealt out."""
        return self.tokens.derived(Documents)

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Offsets of this rank's documents."""
        own = self.tokens.cu_seqlens[
            self.documents.cuts[self.rank] : self.documents.cuts[self.rank + 1] + 1
        ]
        return tuple(offset - own[0] for offset in own)

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
        first = self.tokens.cu_seqlens[self.documents.cuts[self.rank]]
        return torch.arange(first, first + self.core_rows)

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Hidden states of the tokens that move, there and back."""
        moved = self.documents.moved_rows
        leaving = int(moved[rank].sum() - moved[rank, rank])
        coming = int(moved[:, rank].sum() - moved[rank, rank])
        sent = (leaving + coming) * (hidden_dim or 0) * element_bytes
        return Traffic(("all_to_all",) * 2, ("all_to_all",) * 2, sent, sent)

    def enter(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """Hidden states of this rank's documents, one all-to-all."""
        self.check_rows("Plan.enter", hidden_tD, self.tokens.local_tokens)
        return self.documents.exchange.apply(hidden_tD, collectives)

    def leave(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """Hidden states of this rank's tokens, one all-to-all."""
        self.check_rows("Plan.leave", hidden_tD, self.layer_rows)
        return self.documents.exchange.inverse.apply(hidden_tD, collectives)

    def prepare(self, device: torch.device) -> None:
        """The rows of the exchange, both ways."""
        self.documents.exchange.prepare(self.rank, device)
