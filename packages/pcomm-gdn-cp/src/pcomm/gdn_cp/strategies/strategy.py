"""How the tensors of one mixer travel. This one is for a rank alone: nothing moves.

The other strategies override what differs. All take the group's collectives as an argument, so a
strategy holds integers only.
"""

# t tokens of this rank between layers, T tokens that the core sees, D model dim, W columns

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.layout.token_indices import TokenIndices
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.boundary_states import BoundaryStates
from pcomm.gdn_cp.strategies.head_share import HeadShare
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["Strategy", "StrategyName"]

StrategyName = Literal["heads", "docs", "state", "gather"]


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
