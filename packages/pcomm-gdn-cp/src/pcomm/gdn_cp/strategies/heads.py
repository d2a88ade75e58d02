"""Strategy `heads`: from my tokens with all heads to all tokens with my heads, in one all-to-all.

One exchange of all sections there, and one of the output back: rows by rank become columns by rank.
A key head whose value heads lie on several ranks goes to each of them, so the target is a cover,
and backward adds up the gradients of its copies. Packing is one strided copy for each section and
one row permutation, whatever the number of sequences, by torch or by Triton.
"""

# t tokens of this rank, T of all, W columns of this rank in all sections

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.exchange import Exchange
from pcomm.core.exchange.sections import SectionExchange
from pcomm.core.layout import Layout
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.packing.backend import choose_packing
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.head_share import HeadShare, SectionShare
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["HeadsStrategy"]


class HeadsStrategy(Strategy):
    """All tokens of this rank's heads.

    Raises:
        LayoutError: The ranks do not divide the heads of the output.
    """

    name = "heads"

    def __init__(self, spec: Spec, tokens: TokenLayout, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        _ = self.share

    @cached_property
    def share(self) -> HeadShare:
        """The r-th of equal shares of heads."""
        return HeadShare(self.spec, self.tokens.size, self.rank)

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Every section there and the output back, but for the part that stays; the same on all."""
        width = sum(share.width for share in (*self.share.sections, self.share.output))
        sent = self.tokens.local_tokens * width * (self.tokens.size - 1) * element_bytes
        return Traffic(("all_to_all",) * 2, ("all_to_all",) * 2, sent, sent)

    def to_heads(
        self, sections: Sequence[Tensor], collectives: Collectives, fused: int
    ) -> list[Tensor]:
        """All tokens of this rank's heads: views of one buffer, one all-to-all."""
        self.check_sections(sections, fused)
        packing = choose_packing(sections[0].device, sections[0].dtype).packing
        return [*self._there.apply(sections, collectives, packing=packing, fused=fused)]

    def from_heads(self, output_TW: Tensor, collectives: Collectives) -> Tensor:
        """All heads of this rank's tokens, one all-to-all."""
        self.check_output(output_TW)
        packing = choose_packing(output_TW.device, output_TW.dtype).packing
        return self._back.apply(output_TW, collectives, packing=packing)

    def prepare(self, device: torch.device) -> None:
        """Both directions of the row permutation."""
        self.tokens.row_order.on(device)

    @cached_property
    def _there(self) -> SectionExchange:
        return Exchange.sections(self._exchange(share) for share in self.share.sections)

    @cached_property
    def _back(self) -> Exchange:
        return self._exchange(self.share.output).inverse

    def _exchange(self, share: SectionShare) -> Exchange:
        """My tokens of all heads to all tokens of my heads."""
        columns = share.columns
        every_column = Layout.whole(columns.width, self.tokens.size)
        return Exchange(
            {0: self.tokens.layout, 1: every_column},
            {0: self._every_token, 1: columns.layout},
        )

    @cached_property
    def _every_token(self) -> Layout:
        return Layout.whole(self.tokens.num_tokens, self.tokens.size)
