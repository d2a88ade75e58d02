"""Strategy `heads`: from my tokens with all heads to all tokens with my heads, in one all-to-all.

All sections travel in one message, in rank order and section by section, so that packing is one
strided copy for each section whatever the number of sequences. What arrives is brought into the
order of the pack by one row permutation, whose gradient is the inverse permutation. The way back
is the same the other way round, and each direction is the gradient of the other. So every element
is read and written once on each side of the all-to-all, by `messages`.
"""

# t tokens of this rank, T of all, R ranks, W columns of this rank in all sections

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.index import inverse_order
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
        """The r-th of equal stretches of heads."""
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
        widths = [share.width for share in self.share.sections]
        parts: tuple[Tensor, ...] = _ToHeads.apply(  # type: ignore[no-untyped-call]
            self,
            self.share.sections,
            (sum(widths[:fused]), *widths[fused:]),
            collectives,
            *sections,
        )
        return list(parts)

    def from_heads(self, output_TW: Tensor, collectives: Collectives) -> Tensor:
        """All heads of this rank's tokens, one all-to-all."""
        self.check_output(output_TW)
        (local,) = _FromHeads.apply(  # type: ignore[no-untyped-call]
            self, (self.share.output,), (self.share.output.width,), collectives, output_TW
        )
        output: Tensor = local
        return output

    def prepare(self, device: torch.device) -> None:
        """Both directions of the row permutation."""
        if not self.tokens.is_natural:
            self.on(device, self._arrival)
            self.on(device, self._pack)

    # -- moving --------------------------------------------------------------------------

    def _arrival(self) -> Tensor:
        """Where each token of the pack is among those received."""
        return inverse_order(self.tokens.order)

    def _pack(self) -> Tensor:
        """Which token of the pack stands at each place of the message."""
        return self.tokens.order

    def _scatter(
        self,
        sections: Sequence[Tensor],
        shares: tuple[SectionShare, ...],
        collectives: Collectives,
    ) -> Tensor:
        """`[T, W]`, all tokens of my columns."""
        packing = choose_packing(sections[0].device, sections[0].dtype)
        message_TW = packing.pack_sections(sections, shares, self.tokens.size)
        received_TW = collectives.all_to_all(message_TW)
        if self.tokens.is_natural:
            return received_TW
        return packing.take_rows([received_TW], self.on(received_TW.device, self._arrival))

    def _collect(
        self,
        parts: Sequence[Tensor],
        shares: tuple[SectionShare, ...],
        collectives: Collectives,
    ) -> tuple[Tensor, ...]:
        """The sections of my tokens, `[t, columns of all ranks]` each; copies are added up."""
        packing = choose_packing(parts[0].device, parts[0].dtype)
        if self.tokens.is_natural:
            message_TW = parts[0] if len(parts) == 1 else packing.take_rows(parts, None)
        else:
            message_TW = packing.take_rows(parts, self.on(parts[0].device, self._pack))
        received_TW = collectives.all_to_all(message_TW)
        return packing.unpack_sections(received_TW, shares, self.tokens.size)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        strategy: HeadsStrategy,
        shares: tuple[SectionShare, ...],
        widths: tuple[int, ...],
        collectives: Collectives,
        *sections: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way = (strategy, shares, widths, collectives)
        buffer_TW = strategy._scatter(sections, shares, collectives)
        # Split here, so that the gradients of the parts come apart and need not be put together.
        return buffer_TW.split(widths, -1) if len(widths) > 1 else (buffer_TW,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 4, *_FromHeads.apply(*ctx.way, *grads)  # type: ignore[no-untyped-call]


class _FromHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        strategy: HeadsStrategy,
        shares: tuple[SectionShare, ...],
        widths: tuple[int, ...],
        collectives: Collectives,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way = (strategy, shares, widths, collectives)
        return strategy._collect(parts, shares, collectives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 4, *_ToHeads.apply(*ctx.way, *grads)  # type: ignore[no-untyped-call]
