"""Mode `heads`: from my tokens with all heads to all tokens with my heads, in one all-to-all.

All sections travel in one message, in rank order and section by section, so that packing is one
strided copy for each section whatever the number of sequences. What arrives is brought into the
order of the pack by one row permutation, whose gradient is the inverse permutation. The way back
is the same the other way round, and each direction is the gradient of the other.
"""

# t tokens of this rank, T of all, R ranks, W columns of this rank in all sections

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.positions import inverse_order
from pcomm.gdn_cp.head_share import HeadShare, SectionShare
from pcomm.gdn_cp.route import Route, Traffic
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.tokens import Tokens

__all__ = ["HeadsRoute"]


class HeadsRoute(Route):
    """All tokens of this rank's heads.

    Raises:
        LayoutError: The ranks do not divide the heads of the output.
    """

    mode = "heads"

    def __init__(self, spec: Spec, tokens: Tokens, rank: int) -> None:
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
        buffer: Tensor = _ToHeads.apply(  # type: ignore[no-untyped-call]
            self, self.share.sections, collectives, *sections
        )
        widths = [share.width for share in self.share.sections]
        return list(buffer.split([sum(widths[:fused]), *widths[fused:]], -1))

    def from_heads(self, output_TW: Tensor, collectives: Collectives) -> Tensor:
        """All heads of this rank's tokens, one all-to-all."""
        self.check_output(output_TW)
        (local,) = _FromHeads.apply(  # type: ignore[no-untyped-call]
            self, (self.share.output,), collectives, output_TW
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
        widths = [share.width for share in shares]
        num_ranks, num_tokens = self.tokens.size, self.tokens.local_tokens
        message_RtW = sections[0].new_empty(num_ranks, num_tokens, sum(widths))
        places = message_RtW.split(widths, -1)
        for place_RtW, section, share in zip(places, sections, shares, strict=True):
            if share.copies > 1:
                heads = section.unflatten(-1, (share.section.num_heads, share.section.head_width))
                section = heads.repeat_interleave(share.copies, 1).flatten(1)
            place_RtW.copy_(section.unflatten(-1, (num_ranks, share.width)).transpose(0, 1))
        received_TW = collectives.all_to_all(message_RtW.flatten(0, 1))
        if self.tokens.is_natural:
            return received_TW
        return received_TW.index_select(0, self.on(received_TW.device, self._arrival))

    def _collect(
        self, buffer_TW: Tensor, shares: tuple[SectionShare, ...], collectives: Collectives
    ) -> tuple[Tensor, ...]:
        """The sections of my tokens, `[t, columns of all ranks]` each; copies are added up."""
        if not self.tokens.is_natural:
            buffer_TW = buffer_TW.index_select(0, self.on(buffer_TW.device, self._pack))
        received_TW = collectives.all_to_all(buffer_TW)
        received_RtW = received_TW.unflatten(0, (self.tokens.size, self.tokens.local_tokens))
        ends = accumulate(share.width for share in shares)
        sections = []
        for share, end in zip(shares, ends, strict=True):
            part_RtW = received_RtW[:, :, end - share.width : end]
            section = part_RtW.transpose(0, 1).flatten(1)
            if share.copies > 1:
                split = (share.section.num_heads, share.copies, share.section.head_width)
                section = section.unflatten(-1, split).sum(2).flatten(1)
            sections.append(section)
        return tuple(sections)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        route: HeadsRoute,
        shares: tuple[SectionShare, ...],
        collectives: Collectives,
        *sections: Tensor,
    ) -> Tensor:
        ctx.way = (route, shares, collectives)
        return route._scatter(sections, shares, collectives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_FromHeads.apply(*ctx.way, *grads)  # type: ignore[no-untyped-call]


class _FromHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        route: HeadsRoute,
        shares: tuple[SectionShare, ...],
        collectives: Collectives,
        buffer_TW: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way = (route, shares, collectives)
        return route._collect(buffer_TW, shares, collectives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _ToHeads.apply(*ctx.way, *grads)  # type: ignore[no-untyped-call]
