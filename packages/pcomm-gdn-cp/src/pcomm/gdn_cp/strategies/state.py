"""Strategy `state`: tokens stay, and what each segment does to a state travels.

Each rank holds pieces of sequences, with all heads. See `handover` for what passes between them.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.layout.sequence_segments import SequenceSegments
from pcomm.gdn_cp.layout.token_indices import TokenIndices
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.ops.offsets import PackOffsets
from pcomm.gdn_cp.specs import AttentionSpec, Spec
from pcomm.gdn_cp.strategies.state_passing import StatePassing
from pcomm.gdn_cp.strategies.strategy import Strategy, Traffic

__all__ = ["StateStrategy"]


class StateStrategy(Strategy):
    """The tokens of this rank as pieces of sequences, with all heads.

    Raises:
        UnsupportedError: The mixer has no state.
    """

    name = "state"

    def __init__(self, spec: Spec, tokens: TokenLayout, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        if isinstance(spec, AttentionSpec):
            raise UnsupportedError(
                f"make_plan: strategy 'state' for {spec}",
                found="a mixer without a state",
                why="Softmax attention has to see every token before, not a summary of them.",
                fix="Use strategy 'heads', 'docs' or 'gather' for it.",
            )
        self._reach = spec.conv_width - 1

    @cached_property
    def carry(self) -> StatePassing:
        """What the pieces take from those before them."""
        view = TokenIndices(self.tokens, self.rank)
        return StatePassing(self.share, view, self.tokens.derived(_pieces, self._reach))

    @property
    def cu_seqlens(self) -> PackOffsets:
        """Offsets of this rank's pieces."""
        return self.carry.cu_seqlens

    @property
    def core_rows(self) -> int:
        """Tokens of this rank."""
        return self.tokens.local_tokens

    def core_tokens(self) -> Tensor:
        """The tokens of this rank, as they lie."""
        return self.tokens.of_rank(self.rank)

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Halos and maps."""
        return self.carry.traffic(rank, element_bytes)


def _pieces(tokens: TokenLayout, reach: int) -> SequenceSegments:
    return SequenceSegments(tokens.cu_seqlens, tokens.layout, reach)
