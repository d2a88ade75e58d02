"""How the tensors of one mixer travel: a rank alone, then each strategy as what differs from that.

- `heads`, which is Ulysses: from my tokens with all heads to all tokens with my heads. One exchange
  of all sections there, and one of the output back: rows by rank become columns by rank. A key head
  whose value heads lie on several ranks goes to each of them, so the target is a cover, and
  backward adds up the gradients of its copies. Packing is one strided copy for each section and one
  row permutation, whatever the number of sequences, by torch or by Triton.
- `gather`, the baseline: every rank gathers all tokens, computes all of them and keeps its own, so
  that nothing has to divide, and memory and compute do not shrink with the number of ranks. It is
  an exchange whose target covers everything on every rank: an all-gather, and backward a
  reduce-scatter.

`state` and `docs` (`documents`) have files of their own. All take the group's collectives as an
argument, so a strategy holds integers only.
"""

# t tokens of this rank between layers, T tokens that the core sees, D model dim, W columns

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.exchange.exchange import Exchange, SectionExchange
from pcomm.core.layout import Layout
from pcomm.gdn_cp.ops.backend import choose_packing
from pcomm.gdn_cp.pack_offsets import PackOffsets
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.strategies.boundary_states import BoundaryStates
from pcomm.gdn_cp.strategies.head_share import HeadShare, SectionShare, Traffic
from pcomm.gdn_cp.token_layout import TokenIndices, TokenLayout

__all__ = ["GatherStrategy", "HeadsStrategy", "Strategy", "StrategyName"]


StrategyName = Literal["heads", "docs", "state", "gather"]
"""`heads` is the all-to-all that is known as Ulysses."""


class Strategy(TokenIndices):
    """The way of one mixer on one rank; this one stays where it is.

    Args:
        spec: The mixer.
        tokens: The pack.
        rank: This rank's place in the group.
    """

    name: ClassVar[StrategyName] = "heads"

    def __init__(self, spec: Spec, tokens: TokenLayout, rank: int) -> None:
        super().__init__(tokens, rank)
        self.spec = spec

    @cached_property
    def share(self) -> HeadShare:
        """The heads that the core of this rank works on: all of them."""
        return HeadShare(self.spec, 1, 0)

    @property
    def cu_seqlens(self) -> PackOffsets:
        """Offsets of the sequences that the core sees."""
        return self.tokens.offsets

    @property
    def imbalance(self) -> float:
        """By how much the busiest rank has more tokens than the average: 0.1 is 10 % more."""
        return 0.0

    @property
    def core_rows(self) -> int:
        """Tokens that the core sees."""
        return self.tokens.num_tokens

    @property
    def layer_rows(self) -> int:
        """Tokens between `enter` and `to_heads`, and between `from_heads` and `leave`."""
        return self.tokens.local_tokens

    @cached_property
    def boundary_states(self) -> BoundaryStates:
        """What sequences take over the boundaries of the pack."""
        return BoundaryStates(self.share, self.tokens, self.rank)

    @property
    def num_cut_documents(self) -> int:
        """Documents that strategy `docs` has cut."""
        return 0

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """What `rank` sends: nothing."""
        return Traffic()

    def enter(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """Hidden states of this rank's tokens, as the projections want them."""
        self.check_rows("Plan.enter", hidden_tD, self.tokens.local_tokens)
        return hidden_tD

    def leave(self, hidden_tD: Tensor, collectives: Collectives) -> Tensor:
        """What `enter` undoes."""
        self.check_rows("Plan.leave", hidden_tD, self.layer_rows)
        return hidden_tD

    def to_heads(
        self, sections: Sequence[Tensor], collectives: Collectives, fused: int
    ) -> list[Tensor]:
        """The sections for the core, the first `fused` of them side by side."""
        self.check_sections(sections, fused)
        return [_joined(sections[:fused]), *sections[fused:]]

    def from_heads(self, output_TW: Tensor, collectives: Collectives) -> Tensor:
        """The core's output, back at the tokens of this rank."""
        self.check_output(output_TW)
        return output_TW

    def prepare(self, device: torch.device) -> None:
        """Make the index tensors on `device`, so that no step has to wait for them."""

    # -- for the strategies -------------------------------------------------------------------

    def check_rows(self, asked: str, x: Tensor, num_rows: int) -> None:
        """Refuse a tensor of other tokens, before anything is sent."""
        if x.dim() == 0 or len(x) != num_rows:
            raise LayoutError(
                f"{asked}: {type(self.spec).__name__}",
                found=f"shape {tuple(x.shape)} on rank {self.rank}",
                why=f"Here it has {num_rows} tokens along its first dimension: the plan is for "
                f"{self.tokens.num_tokens} over {self.tokens.size} ranks, strategy {self.name!r}.",
                fix="End cu_seqlens at the length of the buffer, padding included.",
            )

    def check_sections(self, sections: Sequence[Tensor], fused: int) -> None:
        """Refuse sections that are not those of the specification, before anything is sent."""
        if not 1 <= fused <= len(self.spec.sections):
            raise ConfigError(
                f"Plan.to_heads: fused={fused}",
                found=f"{len(self.spec.sections)} sections of {type(self.spec).__name__}",
                why="So many of the first sections are returned as one tensor.",
                fix="Use 1 to have them all apart.",
            )
        rows = self.layer_rows
        wanted = [(rows, section.width) for section in self.spec.sections]
        found = [tuple(x.shape) for x in sections]
        kinds = {(x.dtype, x.device) for x in sections}
        if wanted != found or len(kinds) != 1:
            names = ", ".join(section.name for section in self.spec.sections)
            raise LayoutError(
                f"Plan.to_heads: {names} of {type(self.spec).__name__}",
                found=f"shapes {found} in {sorted({str(x.dtype) for x in sections})}",
                why=f"They travel in one message, so they have one dtype and shapes {wanted}.",
                fix="Pass the projections of this rank's tokens, [tokens, heads * width] each.",
            )

    def check_output(self, output_TW: Tensor) -> None:
        """Refuse an output of another shape, before anything is sent."""
        wanted = (self.core_rows, self.share.output.width)
        if tuple(output_TW.shape) != wanted:
            raise LayoutError(
                f"Plan.from_heads: output of {type(self.spec).__name__}",
                found=f"shape {tuple(output_TW.shape)}",
                why=f"The core of rank {self.rank} has {wanted[0]} tokens and "
                f"{self.share.output.num_heads} heads, so the output has shape {wanted}.",
                fix="Pass the output of the core, flattened to [tokens, heads * width].",
            )


def _joined(sections: Sequence[Tensor]) -> Tensor:
    return sections[0] if len(sections) == 1 else torch.cat(list(sections), -1)


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
