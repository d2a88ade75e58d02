"""Strategy `gather`: every rank gathers all tokens, computes all of them and keeps its own.

The baseline: nothing has to divide, memory and compute do not shrink with the number of ranks.
"""

# t tokens of this rank, T of all, W columns of all sections

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.index import inverse_order
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
        device = sections[0].device
        arrival, order = self.on(device, self._arrival), self.on(device, self._order)
        # Differentiable ones, so that backward is recorded too where its gradient is asked for.
        gathered_TW = differentiable(collectives).all_gather(torch.cat(list(sections), -1))
        # A permutation, whose own backward would add rows up one by one.
        buffer_TW = with_adjoint(
            gathered_TW,
            lambda x: x.index_select(0, arrival),
            lambda grad: grad.index_select(0, order),
        )
        widths = [section.width for section in self.spec.sections]
        return list(buffer_TW.split([sum(widths[:fused]), *widths[fused:]], -1))

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
        """The permutations and this rank's rows."""
        for make in (self._arrival, self._order, self._own):
            self.on(device, make)

    def _order(self) -> Tensor:
        return self.tokens.order

    def _arrival(self) -> Tensor:
        return inverse_order(self.tokens.order)

    def _own(self) -> Tensor:
        return self.tokens.of_rank(self.rank)
