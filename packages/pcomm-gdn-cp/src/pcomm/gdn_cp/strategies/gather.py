"""Strategy `gather`: every rank gathers all tokens, computes all of them and keeps its own.

The baseline: nothing has to divide, memory and compute do not shrink with the number of ranks. It
is an exchange whose target covers everything on every rank: an all-gather, and backward a
reduce-scatter.
"""

# T tokens of all ranks, W columns of the output

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.exchange import Exchange
from pcomm.core.exchange.sections import SectionExchange
from pcomm.core.layout import Layout
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["GatherStrategy"]


class GatherStrategy(Strategy):
    """All tokens and all heads on every rank."""

    name = "gather"

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """All sections to every rank; their gradients back to the rank that holds the token."""
        width = sum(section.width for section in self.spec.sections)
        sent = self.tokens.local_tokens * width * (self.tokens.size - 1) * element_bytes
        return Traffic(("all_gather",), ("reduce_scatter",), sent, sent)

    def to_heads(
        self, sections: Sequence[Tensor], collectives: Collectives, fused: int
    ) -> list[Tensor]:
        """All tokens of all heads: views of one buffer, one all-gather."""
        self.check_sections(sections, fused)
        return [*self._there.apply(sections, collectives, fused=fused)]

    def from_heads(self, output_TW: Tensor, collectives: Collectives) -> Tensor:
        """The rows of this rank's tokens; nothing is sent."""
        self.check_output(output_TW)
        own = self.on(output_TW.device, self._own)
        shape = output_TW.shape
        return with_adjoint(
            output_TW,
            lambda x: x.index_select(0, own),
            lambda grad: grad.new_zeros(shape).index_copy(0, own, grad),
        )

    def prepare(self, device: torch.device) -> None:
        """The permutation of the rows, both ways, and this rank's rows."""
        self.tokens.row_order.on(device)
        self.on(device, self._own)

    @cached_property
    def _there(self) -> SectionExchange:
        tokens = self.tokens.layout
        every_token = Layout.whole(tokens.length, tokens.size)
        widths = (Layout.whole(s.width, tokens.size) for s in self.spec.sections)
        return Exchange.sections(
            Exchange({0: tokens, 1: columns}, {0: every_token, 1: columns}) for columns in widths
        )

    def _own(self) -> Tensor:
        return self.tokens.of_rank(self.rank)
